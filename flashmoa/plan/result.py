"""Compute the answers of a plan from its rounds (``summarise``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

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
        typical: for each way, the run that has the median, or is next below it; what is said of
            calls is theirs.
        waits: what ``typical`` waited for unlinked, call by call.
        linked_waits: the same calls in the linked run; ``None`` for one that it does not have.
    """

    rounds: int
    copies: int
    slowdown: float
    seconds: Mapping[str, float]
    spread: Mapping[str, tuple[float, float]]
    typical: Mapping[str, TeamRun]
    waits: Sequence[Wait]
    linked_waits: Sequence[Wait | None]
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
    def busiest(self) -> EngineShare:
        """Return the engine that computes for the largest share of the time, unlinked."""
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
                {**asdict(wait), "prefill_linked": linked and linked.prefill}
                for wait, linked in zip(self.waits, self.linked_waits, strict=True)
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
    typical = {way: _typical(played) for way, played in by_way.items()}
    times = {way: [run.seconds for run in _all_runs(played)] for way, played in by_way.items()}
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
        spread={way: (min(values), max(values)) for way, values in times.items()},
        typical=typical,
        waits=unlinked,
        linked_waits=[linked.get((wait.agent, wait.turn)) for wait in unlinked],
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


def _all_runs(rounds: Sequence[Round]) -> list[TeamRun]:
    return [run for played in rounds for run in played.runs]


def _typical(rounds: Sequence[Round]) -> TeamRun:
    """Return the run with the median time; of two, the shorter one."""
    runs = sorted(_all_runs(rounds), key=lambda run: run.seconds)
    return runs[(len(runs) - 1) // 2]


def _busy_share(rounds: Sequence[Round], engine: str) -> float:
    computed = sum(played.devices[engine]["device_seconds"] for played in rounds)
    return computed / sum(played.seconds for played in rounds)
