"""Compute the answers of a plan from its rounds (``summarise``), and print them (``show``).

The end of a run waits for some of its calls only (``critical_path``). Between two of them the run
waits for the later one's prompt to be prefilled. Links could at best have prefilled all of it
before, since it consists of text that was known when the run began, and of text that was written by
then; only one step of the engine is left, for the last token. There has to be time for it, too: as
long as the run had lasted. The bound is what links could have saved so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Annotated, Any

from rich.console import Console

from flashmoa.observe import LinkDeclined, LinkWaits
from flashmoa.observe.calls import Call
from flashmoa.observe.timeline import draw, lanes
from flashmoa_bench.harness.critical_path import critical_path, end_of
from flashmoa_bench.harness.report import Column, make_table
from flashmoa_bench.plan.runs import WAYS, Round, TeamRun


@dataclass(frozen=True, slots=True)
class Wait:
    """Says how long a run waited for one call; times in seconds.

    Attributes:
        turn: number of the agent's call, from 1.
        prefill: from the request to its first token: the queue, the prefill and one step.
        avoidable: the part of ``prefill`` that links could hide at most.
        decode: from the first token to the last.
        is_estimated: whether the answer came in one piece, as of an agent with tools, so that its
            first token was not seen: then ``decode`` is as many of the engine's steps as tokens.
        linked: the same call in the linked run; ``None`` if it does not have it.
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
    def name(self) -> Annotated[str, Column("agent")]:
        return self.agent if self.turn == 1 else f"{self.agent} ({self.turn})"

    @property
    def figures(self) -> Annotated[Mapping[str, str | None], Column("{}")]:
        """Return the texts of the table's other columns, by their titles."""
        return {
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
    calls: Sequence[Call], steps: Mapping[str, float], path: Sequence[Call] | None = None
) -> list[Wait]:
    """Return what a run waited for in each call of its critical path.

    Args:
        steps: seconds of a decode step of one request on each engine.
        path: other calls, which have ended, in the path's place.
    """
    turns, turn_of = Counter[str](), dict[str, int]()
    for call in calls:
        turns[call.agent] += 1
        turn_of[call.started.call_id] = turns[call.agent]
    path = critical_path(calls) if path is None else path
    # Calls that are sent together come moments after one another; none of them can be helped.
    begin = path[0].started.at if path else 0.0
    return [
        _wait(call, turn_of[call.started.call_id], begin, steps[call.started.engine])
        for call in path
    ]


def _wait(call: Call, turn: int, begin: float, step: float) -> Wait:
    usage, sent, end = call.usage, call.started.at, end_of(call)
    steps = max(0, usage.completion_tokens - 1) if usage is not None else 0
    decode = end - (call.first_token or end)
    # A step is never much faster than one of a single request.
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
        avoidable=max(0.0, min(prefill - step, sent - begin)),
        decode=decode,
        is_estimated=is_estimated,
    )


@dataclass(frozen=True, slots=True)
class EngineShare:
    """Says which agents an engine has, and for what share of the time its GPU computed."""

    name: Annotated[str, Column("engine")]
    gpu: str
    agents: tuple[str, ...]
    busy: Annotated[Mapping[str, float], Column("{}", "{:.0%}")]

    @property
    def users(self) -> Annotated[str, Column("agents")]:
        return ", ".join(self.agents) or "none"


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The answers of a plan; times in seconds, for one copy of the team.

    Attributes:
        seconds: median time of a copy, unlinked and linked.
        spread: shortest and longest time of a copy.
        typical: for each way, the run that has the median, or is next below it; what is said of
            calls is theirs.
        waits: what ``typical`` waited for unlinked, call by call.
    """

    rounds: int
    copies: int
    slowdown: float
    seconds: Mapping[str, float]
    spread: Mapping[str, tuple[float, float]]
    typical: Mapping[str, TeamRun]
    waits: Sequence[Wait]
    engines: Sequence[EngineShare]

    @property
    def saved(self) -> float:
        """Seconds that links saved."""
        return self.seconds["unlinked"] - self.seconds["linked"]

    @property
    def bound(self) -> float:
        """Seconds that they could have saved at most."""
        return sum(wait.avoidable for wait in self.waits)

    @property
    def busiest(self) -> EngineShare:
        """Engine that computes for the largest share of the time, unlinked."""
        return max(self.engines, key=lambda engine: engine.busy["unlinked"])

    def describe_gpus(self) -> str:
        """Return how many engines there are, and what they call their modelled GPUs."""
        names = {engine.gpu for engine in self.engines}
        if len(names) == 1:
            return f"{len(self.engines)} x {names.pop()}"
        return "; ".join(f"{engine.name}: {engine.gpu}" for engine in self.engines)

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {
            "rounds": self.rounds,
            "copies": self.copies,
            "slowdown": self.slowdown,
            "seconds": dict(self.seconds),
            "spread": dict(self.spread),
            "saved_seconds": self.saved,
            "bound_seconds": self.bound,
            "busiest_engine": self.busiest.name,
            "engines": [asdict(engine) for engine in self.engines],
            "calls": [
                {**asdict(wait), "prefill_linked": wait.linked and wait.linked.prefill}
                for wait in self.waits
            ],
        }


def summarise(
    rounds: Sequence[Round],
    gpus: Mapping[str, str],
    steps: Mapping[str, float],
    placement: Mapping[str, str],
) -> PlanResult:
    """Compute the answers from rounds of both ways.

    Args:
        gpus: the engines' names, and what they call their modelled GPUs, in order.
        steps: seconds of a decode step of one request on each engine.
        placement: the name of each agent's engine.
    """
    by_way = {way: [played for played in rounds if played.way == way] for way in WAYS}
    runs = {
        way: sorted((run for one in played for run in one.runs), key=lambda run: run.seconds)
        for way, played in by_way.items()
    }
    # Of an even number, the shorter one of the two in the middle.
    typical = {way: own[(len(own) - 1) // 2] for way, own in runs.items()}
    times = {way: [run.seconds for run in own] for way, own in runs.items()}
    unlinked = waits(typical["unlinked"].calls, steps)
    # Another call may hold up the end of the linked run.
    calls = typical["linked"].calls
    ended = [call for call in calls if call.finished is not None]
    linked = {(wait.agent, wait.turn): wait for wait in waits(calls, steps, ended)}
    return PlanResult(
        rounds=len(by_way["linked"]),
        copies=len(rounds[0].runs),
        slowdown=max(device["slowdown"] for device in rounds[0].devices.values()),
        seconds={way: median(values) for way, values in times.items()},
        spread={way: (values[0], values[-1]) for way, values in times.items()},
        typical=typical,
        waits=[replace(wait, linked=linked.get((wait.agent, wait.turn))) for wait in unlinked],
        engines=[
            EngineShare(
                name,
                gpu,
                tuple(agent for agent, engine in placement.items() if engine == name),
                {way: _busy_share(played, name) for way, played in by_way.items()},
            )
            for name, gpu in gpus.items()
        ],
    )


def _busy_share(rounds: Sequence[Round], engine: str) -> float:
    computed = sum(played.devices[engine]["device_seconds"] for played in rounds)
    return computed / sum(played.seconds for played in rounds)


# A smaller share of the bound may be this machine's doing.
_MOSTLY_REACHED = 0.8


def show(result: PlanResult, console: Console) -> None:
    """Print the answers, tables of calls and engines, and a timeline of each way."""
    console.print(f"\n{result.describe_gpus()}", markup=False)
    console.print(
        f"Modelled, not measured on GPUs. Medians (ranges); rounds: {result.rounds}, "
        f"copies at once: {result.copies}.\n"
    )
    _print_answers(result, console)
    title = "Calls that the end of the unlinked run waits for"
    console.print(make_table(title, result.waits, left=("agent", "engine")))
    console.print(
        "TTFT: from the request to the first token, ~ where the answer comes in one piece; "
        "hideable: what of it links could hide at most\n"
    )
    title = "Share of the time in which the GPU computes"
    console.print(make_table(title, result.engines, left=("engine", "agents")))
    for way, run in result.typical.items():
        console.print(f"\n{way} ({run.seconds:.2f} s)")
        console.print(
            draw(lanes(run.events), min(console.width, 110)), markup=False, highlight=False
        )
    for line in _notes(result.typical["linked"]):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print_answers(result: PlanResult, console: Console) -> None:
    unlinked, saved, most = result.seconds["unlinked"], result.saved, result.bound
    decode = sum(wait.decode for wait in result.waits)
    reached = f", links reach {saved / most:.0%} of that" if most > 0 else ""
    spread = {way: f"{low:.2f} to {high:.2f}" for way, (low, high) in result.spread.items()}
    console.print(f"unlinked    {unlinked:7.2f} s   ({spread['unlinked']})")
    console.print(
        f"linked      {result.seconds['linked']:7.2f} s   ({spread['linked']}), saves "
        f"{saved:.2f} s, {saved / unlinked:.0%}"
    )
    console.print(f"the bound   {unlinked - most:7.2f} s   would save {most:.2f} s{reached}")
    console.print(f"decoding    {decode:7.2f} s   of the unlinked time; links do not change it")
    busiest = result.busiest
    console.print(
        f"busiest     {busiest.busy['unlinked']:7.0%}     {busiest.name} computes; near 100% it is "
        "the bottleneck",
        markup=False,
    )
    if saved < _MOSTLY_REACHED * most:
        console.print(
            "If a larger --slowdown brings linked nearer to the bound, this machine's clients and "
            "HTTP take the time that is missing, and not the GPUs."
        )
    if result.slowdown != 1:
        scale = result.slowdown
        console.print(
            f"These times are those of GPUs {scale:g} times slower. At their own speed: unlinked "
            f"{unlinked / scale:.2f} s, linked {result.seconds['linked'] / scale:.2f} s, saved "
            f"{saved / scale:.2f} s, at most {most / scale:.2f} s."
        )
    console.print()


def _notes(linked: TeamRun) -> list[str]:
    """Return why agents were not linked, or not fully."""
    lines: dict[str, None] = {}
    for event in linked.events:
        if isinstance(event, LinkDeclined):
            lines[f"{event.agent} is not linked: {event.reason}"] = None
        elif isinstance(event, LinkWaits):
            lines[f"the link to {event.agent} waits for {event.upstream}: {event.reason}"] = None
    return list(lines)
