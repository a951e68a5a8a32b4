"""Summarise the rounds of a plan (``summarise``), and print the summary (``show``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from flashmoa.observe import LinkDeclined, LinkWaits
from flashmoa.observe.timeline import draw, lanes
from flashmoa.plan.bound import Wait, bound, waits
from flashmoa.plan.runs import WAYS, Round, TeamRun


@dataclass(frozen=True, slots=True)
class EngineShare:
    """Says which agents an engine has, and for what share of the time its GPU computed."""

    name: str
    gpu: str
    agents: tuple[str, ...]
    busy: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The answers of a plan; times in seconds, for one copy of the team.

    Attributes:
        seconds: median time of a copy, unlinked and linked.
        spread: shortest and longest time of a copy.
        typical: for each way, the run that has the median; what is said of calls is theirs.
        waits: what ``typical`` waited for unlinked, call by call.
        linked_prefill: for these calls, the time to the first token linked; ``None`` for a call
            that the linked run does not have.
    """

    rounds: int
    copies: int
    slowdown: float
    seconds: Mapping[str, float]
    spread: Mapping[str, tuple[float, float]]
    typical: Mapping[str, TeamRun]
    waits: Sequence[Wait]
    linked_prefill: Sequence[float | None]
    engines: Sequence[EngineShare]

    @property
    def saved(self) -> float:
        """Return the seconds that links saved."""
        return self.seconds["unlinked"] - self.seconds["linked"]

    @property
    def bound(self) -> float:
        """Return the seconds that they could have saved at most."""
        return bound(self.waits)

    @property
    def bottleneck(self) -> EngineShare:
        """Return the engine that computes for the largest share of the time, unlinked."""
        return max(self.engines, key=lambda engine: engine.busy["unlinked"])

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
            "bottleneck": self.bottleneck.name,
            "engines": [asdict(engine) for engine in self.engines],
            "calls": [
                {**asdict(wait), "prefill_linked": linked}
                for wait, linked in zip(self.waits, self.linked_prefill, strict=True)
            ],
        }


def summarise(
    rounds: Sequence[Round],
    gpus: Mapping[str, str],
    steps: Mapping[str, float],
    agents: Mapping[str, Sequence[str]],
) -> PlanResult:
    """Compute the answers from rounds of both ways.

    Args:
        gpus: the engines' names, and what they call their modelled GPUs, in order.
        steps: seconds of a decode step of one request on each engine.
        agents: the names of the agents on each engine.
    """
    by_way = {way: [played for played in rounds if played.way == way] for way in WAYS}
    typical = {way: _typical(played) for way, played in by_way.items()}
    times = {way: [run.seconds for run in _all_runs(played)] for way, played in by_way.items()}
    unlinked = waits(typical["unlinked"].calls, steps)
    linked = {
        (wait.agent, wait.turn): wait.prefill for wait in waits(typical["linked"].calls, steps)
    }
    return PlanResult(
        rounds=len(by_way["linked"]),
        copies=len(rounds[0].runs),
        slowdown=max(device["slowdown"] for device in rounds[0].devices.values()),
        seconds={way: run.seconds for way, run in typical.items()},
        spread={way: (min(values), max(values)) for way, values in times.items()},
        typical=typical,
        waits=unlinked,
        linked_prefill=[linked.get((wait.agent, wait.turn)) for wait in unlinked],
        engines=[
            EngineShare(
                name,
                gpu,
                tuple(agents.get(name, ())),
                {way: _busy_share(played, name) for way, played in by_way.items()},
            )
            for name, gpu in gpus.items()
        ],
    )


def _all_runs(rounds: Sequence[Round]) -> list[TeamRun]:
    return [run for played in rounds for run in played.runs]


def _typical(rounds: Sequence[Round]) -> TeamRun:
    """Return the run with the median time; of two, the shorter one."""
    runs = sorted(_all_runs(rounds), key=lambda run: run.seconds)
    return runs[(len(runs) - 1) // 2]


def _busy_share(rounds: Sequence[Round], engine: str) -> float:
    computed = sum(played.devices[engine]["device_seconds"] for played in rounds)
    return computed / sum(played.seconds for played in rounds)


def show(summary: PlanResult, console: Console) -> None:
    """Print the answers, tables of calls and engines, and a timeline of each way."""
    gpus = dict.fromkeys(engine.gpu for engine in summary.engines)
    console.print(f"\n{len(summary.engines)} engines: {'; '.join(gpus)}", markup=False)
    console.print(
        f"Modelled, not measured on GPUs. Rounds: {summary.rounds}; copies at once: "
        f"{summary.copies}; times: medians (shortest to longest).\n"
    )
    _print_answers(summary, console)
    console.print(_make_wait_table(summary))
    console.print(
        "TTFT: from the request to the first token, ~ where the answer comes in one piece; "
        "hideable: what of it links could hide at most\n"
    )
    console.print(_make_engine_table(summary))
    for way, run in summary.typical.items():
        console.print(f"\n{way} ({run.seconds:.2f} s)")
        console.print(
            draw(lanes(run.events), min(console.width, 110)), markup=False, highlight=False
        )
    for line in _notes(summary.typical["linked"]):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print_answers(summary: PlanResult, console: Console) -> None:
    unlinked, saved, most = summary.seconds["unlinked"], summary.saved, summary.bound
    decode = sum(wait.decode for wait in summary.waits)
    reached = f", links reach {saved / most:.0%} of that" if most > 0 else ""
    spread = {way: f"{low:.2f} to {high:.2f}" for way, (low, high) in summary.spread.items()}
    console.print(f"unlinked    {unlinked:7.2f} s   ({spread['unlinked']})")
    console.print(
        f"linked      {summary.seconds['linked']:7.2f} s   ({spread['linked']}), saves "
        f"{saved:.2f} s, {saved / unlinked:.0%}"
    )
    console.print(f"the bound   {unlinked - most:7.2f} s   would save {most:.2f} s{reached}")
    console.print(f"decoding    {decode:7.2f} s   of the unlinked time; links do not change it")
    busiest = summary.bottleneck
    console.print(
        f"bottleneck  {busiest.name}, which computes {busiest.busy['unlinked']:.0%} of the time "
        "unlinked",
        markup=False,
    )
    if summary.slowdown != 1:
        scale = summary.slowdown
        console.print(
            f"These times are those of GPUs {scale:g} times slower. At their own speed: unlinked "
            f"{unlinked / scale:.2f} s, linked {summary.seconds['linked'] / scale:.2f} s, saved "
            f"{saved / scale:.2f} s, at most {most / scale:.2f} s."
        )
    console.print()


def _make_table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)


def _make_wait_table(summary: PlanResult) -> Table:
    table = _make_table("Calls that the end of the unlinked run waits for")
    for name in ("agent", "engine"):
        table.add_column(name)
    for name in ("prompt", "TTFT", "hideable", "TTFT linked", "decode"):
        table.add_column(name, justify="right")
    for wait, linked in zip(summary.waits, summary.linked_prefill, strict=True):
        table.add_row(
            wait.agent if wait.turn == 1 else f"{wait.agent} ({wait.turn})",
            wait.engine,
            str(wait.prompt_tokens),
            f"{'~' if wait.is_estimated else ''}{wait.prefill * 1000:.0f} ms",
            f"{wait.avoidable * 1000:.0f} ms",
            "-" if linked is None else f"{linked * 1000:.0f} ms",
            f"{wait.decode:.2f} s",
        )
    return table


def _make_engine_table(summary: PlanResult) -> Table:
    table = _make_table("Share of the time in which the GPU computes")
    for name in ("engine", "agents"):
        table.add_column(name)
    for way in WAYS:
        table.add_column(way, justify="right")
    for engine in summary.engines:
        shares = [f"{engine.busy[way]:.0%}" for way in WAYS]
        table.add_row(engine.name, ", ".join(engine.agents) or "none", *shares)
    return table


def _notes(linked: TeamRun) -> list[str]:
    """Return why agents were not linked, or not fully."""
    lines: dict[str, None] = {}
    for event in linked.events:
        if isinstance(event, LinkDeclined):
            lines[f"{event.agent} is not linked: {event.reason}"] = None
        elif isinstance(event, LinkWaits):
            lines[f"the link to {event.agent} waits for {event.upstream}: {event.reason}"] = None
    return list(lines)
