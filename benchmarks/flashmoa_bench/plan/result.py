"""Compute the answers of a plan from its rounds (``summarise``), and print them (``show``).

The end of a run waits only for the calls on its critical path. Between two of them, the run waits
until the later call's prompt is prefilled. Links could at best have prefilled the whole prompt
earlier, because its text was known or written by then; only one step of the engine is left, for the
last token. Prefilling ahead hides at most the time that the run had lasted. The bound is the sum of
the times that links could have hidden so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Annotated, Any

from rich.console import Console

from flashmoa.observe import LinkDeclined, LinkWaits
from flashmoa.observe.calls import Call
from flashmoa_bench.harness.critical_path import critical_path, end_of
from flashmoa_bench.harness.report import Column, make_table
from flashmoa_bench.plan.runs import WAYS, Round, TeamRun


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a run waited for one call; times in seconds of the GPU.

    Attributes:
        turn: number of the agent's call, from 1.
        prefill: from the request to its first token: the queue, the prefill and one step.
        avoidable: largest part of ``prefill`` that links could hide.
        decode: from the first token to the last.
        is_estimated: whether the answer came in one piece, as from an agent with tools. Then its
            first token is unknown, and ``decode`` is the tokens times the engine's step.
        linked: the same call in the linked run; ``None`` if it is missing there.
    """

    agent: str
    turn: int
    engine: str
    prompt_tokens: int
    prefill: float
    avoidable: float
    decode: float
    is_estimated: bool = False
    linked: Wait | None = None

    @property
    def cells(self) -> Annotated[Mapping[str, str | None], Column("{}")]:
        """Return the texts of the table's cells, by the columns' titles."""
        return {
            "agent": self.agent if self.turn == 1 else f"{self.agent} ({self.turn})",
            "engine": self.engine,
            "prompt": str(self.prompt_tokens),
            "TTFT": self._first_token,
            "hideable": f"{self.avoidable * 1000:.0f} ms",
            "TTFT linked": "-" if self.linked is None else self.linked._first_token,
            "decode": f"{self.decode:.2f} s",
        }

    @property
    def _first_token(self) -> str:
        return f"{'~' if self.is_estimated else ''}{self.prefill * 1000:.0f} ms"


def waits(
    calls: Sequence[Call],
    steps: Mapping[str, float],
    slowdown: float = 1.0,
    path: Sequence[Call] | None = None,
) -> list[Wait]:
    """Return the waits for the calls on a run's critical path.

    Args:
        steps: each engine's seconds for a single request's decode step.
        slowdown: divides the calls' times.
        path: calls to use instead of the critical path; they have ended.
    """
    turns, turn_of = Counter[str](), dict[str, int]()
    for call in calls:
        turns[call.agent] += 1
        turn_of[call.started.call_id] = turns[call.agent]
    path = critical_path(calls) if path is None else path
    # Calls that are sent together come moments apart, and nothing can be hidden before them.
    begin = path[0].started.at if path else 0.0
    return [
        _wait(call, turn_of[call.started.call_id], begin, steps[call.started.engine], slowdown)
        for call in path
    ]


def _wait(call: Call, turn: int, begin: float, step: float, slowdown: float) -> Wait:
    usage, ended = call.usage, end_of(call)
    sent, first, end = (
        (at - begin) / slowdown for at in (call.started.at, call.first_token or ended, ended)
    )
    steps = max(0, usage.completion_tokens - 1) if usage is not None else 0
    decode = end - first
    # No step is much faster than a step of a single request.
    is_estimated = decode < steps * step / 2
    if is_estimated:
        decode = min(steps * step, end - sent)
    prefill = end - sent - decode
    return Wait(
        agent=call.agent,
        turn=turn,
        engine=call.started.engine,
        prompt_tokens=usage.prompt_tokens if usage is not None else 0,
        prefill=prefill,
        avoidable=max(0.0, min(prefill - step, sent)),
        decode=decode,
        is_estimated=is_estimated,
    )


@dataclass(frozen=True, slots=True)
class EngineShare:
    """An engine's agents, and its GPU's computing share of time."""

    name: Annotated[str, Column("engine")]
    gpu: str
    agents: tuple[str, ...]
    busy: Annotated[Mapping[str, float], Column("{}", "{:.0%}")]

    @property
    def users(self) -> Annotated[str, Column("agents")]:
        return ", ".join(self.agents) or "none"


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The answers of a plan; times in seconds of the GPUs, for one copy of the team.

    Attributes:
        seconds: median time of a copy, unlinked and linked.
        spread: shortest and longest time of a copy.
        bound_seconds: largest time that links could have saved.
        busiest_engine: the engine that computes for the largest share of time, unlinked.
        calls: the waits of the unlinked ``typical`` run, call by call.
        typical: for each way, the run with the median time, or the next shorter run.
    """

    rounds: int
    copies: int
    slowdown: float
    seconds: Mapping[str, float]
    spread: Mapping[str, tuple[float, float]]
    saved_seconds: float
    bound_seconds: float
    busiest_engine: str
    engines: Sequence[EngineShare]
    calls: Sequence[Wait]
    typical: Mapping[str, TeamRun] = field(repr=False)

    @property
    def gpus(self) -> str:
        """Return the names of the engines' modelled GPUs, each once."""
        return "; ".join(dict.fromkeys(engine.gpu for engine in self.engines))

    def as_json(self) -> dict[str, Any]:
        figures = asdict(replace(self, typical={}))
        del figures["typical"]
        return figures


def summarise(
    rounds: Sequence[Round],
    steps: Mapping[str, float],
    placement: Mapping[str, str],
    slowdown: float = 1.0,
) -> PlanResult:
    """Compute the answers from rounds of both ways.

    Args:
        steps: each engine's seconds for a single request's decode step.
        placement: the name of each agent's engine.
        slowdown: the GPUs' slowdown.
    """
    by_way = {way: [played for played in rounds if played.way == way] for way in WAYS}
    runs = {
        way: sorted((run for one in played for run in one.runs), key=lambda run: run.seconds)
        for way, played in by_way.items()
    }
    # With an even number of runs, this is the shorter one of the two in the middle.
    typical = {way: own[(len(own) - 1) // 2] for way, own in runs.items()}
    times = {way: [run.seconds / slowdown for run in own] for way, own in runs.items()}
    seconds = {way: median(values) for way, values in times.items()}
    unlinked = waits(typical["unlinked"].calls, steps, slowdown)
    # The end of the linked run may wait for another call.
    calls = typical["linked"].calls
    ended = [call for call in calls if call.finished is not None]
    linked = {(wait.agent, wait.turn): wait for wait in waits(calls, steps, slowdown, ended)}
    engines = [
        EngineShare(
            name,
            device["name"],
            tuple(agent for agent, engine in placement.items() if engine == name),
            {way: _busy_share(played, name) for way, played in by_way.items()},
        )
        for name, device in rounds[0].devices.items()
    ]
    return PlanResult(
        rounds=len(by_way["linked"]),
        copies=len(rounds[0].runs),
        slowdown=slowdown,
        seconds=seconds,
        spread={way: (values[0], values[-1]) for way, values in times.items()},
        saved_seconds=seconds["unlinked"] - seconds["linked"],
        bound_seconds=sum(wait.avoidable for wait in unlinked),
        busiest_engine=max(engines, key=lambda engine: engine.busy["unlinked"]).name,
        engines=engines,
        calls=[replace(wait, linked=linked.get((wait.agent, wait.turn))) for wait in unlinked],
        typical=typical,
    )


def _busy_share(rounds: Sequence[Round], engine: str) -> float:
    computed = sum(played.devices[engine]["device_seconds"] for played in rounds)
    return computed / sum(played.seconds for played in rounds)


def show(result: PlanResult, console: Console) -> None:
    """Print the answers, tables of calls and engines, and why agents were not fully linked."""
    console.print(f"\n{len(result.engines)} engines, {result.gpus}", markup=False, soft_wrap=True)
    console.print(
        f"Modelled, not measured on GPUs. Medians (ranges); rounds: {result.rounds}, "
        f"copies at once: {result.copies}."
    )
    if result.slowdown != 1:
        console.print(f"Times are the GPUs'; the runs took {result.slowdown:g} times as long.")
    unlinked, saved, most = result.seconds["unlinked"], result.saved_seconds, result.bound_seconds
    decode = sum(wait.decode for wait in result.calls)
    gain = describe_gain(result)
    has_gain = gain.startswith("saves") and most > 0
    reached = f", links reach {saved / most:.0%} of that" if has_gain else ""
    spread = {way: f"{low:.2f} to {high:.2f}" for way, (low, high) in result.spread.items()}
    busy = {engine.name: engine.busy["unlinked"] for engine in result.engines}
    for line in (
        f"\nunlinked    {unlinked:7.2f} s   ({spread['unlinked']})",
        f"linked      {unlinked - saved:7.2f} s   ({spread['linked']}), {gain}",
        f"the bound   {unlinked - most:7.2f} s   would save {most:.2f} s{reached}",
        f"decoding    {decode:7.2f} s   of the unlinked time; links do not change it",
        f"busiest     {busy[result.busiest_engine]:7.0%}     {result.busiest_engine} computes; "
        "near 100% it is the bottleneck\n",
    ):
        console.print(line, markup=False)
    title = "Calls that the end of the unlinked run waits for"
    console.print(make_table(title, result.calls, left=("agent", "engine")))
    console.print(
        "TTFT: from the request to the first token, ~ where the answer comes in one piece; "
        "hideable: the largest part of it that links could hide\n"
    )
    title = "Share of the time in which the GPU computes"
    console.print(make_table(title, result.engines, left=("engine", "agents")))
    for line in _notes(result.typical["linked"]):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def describe_gain(result: PlanResult) -> str:
    """Describe what links save, if every linked run was faster than every unlinked run."""
    saved, unlinked = result.saved_seconds, result.seconds["unlinked"]
    if result.spread["linked"][1] < result.spread["unlinked"][0]:
        return f"saves {saved:.2f} s, {saved / unlinked:.0%}"
    if result.spread["linked"][0] > result.spread["unlinked"][1]:
        return f"is SLOWER by {-saved:.2f} s, {-saved / unlinked:.0%}"
    return "no difference: the ranges overlap"


def _notes(linked: TeamRun) -> list[str]:
    """Return the reasons why agents were not linked, or not fully."""
    lines: dict[str, None] = {}
    for event in linked.events:
        if isinstance(event, LinkDeclined):
            lines[f"{event.agent} is not linked: {event.reason}"] = None
        elif isinstance(event, LinkWaits):
            lines[f"the link to {event.agent} waits for {event.upstream}: {event.reason}"] = None
    return list(lines)
