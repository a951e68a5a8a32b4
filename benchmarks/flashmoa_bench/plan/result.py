"""Compute the answers of a plan from its rounds (``summarise``).

The end of a run waits for some of its calls only (``critical_path``). Between two of them the run
waits for the later one's prompt to be prefilled. Links could at best have prefilled all of it
before, since it consists of text that was known when the run began, and of text that was written by
then; only one step of the engine is left, for the last token. There has to be time for it, too: as
long as the run had lasted. The bound is what links could have saved so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from flashmoa.observe.calls import Call
from flashmoa_bench.harness.critical_path import critical_path, end_of
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
    """

    agent: str
    turn: int
    engine: str
    prompt_tokens: int
    prefill: float
    avoidable: float
    decode: float
    is_estimated: bool = False


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


def _busy_share(rounds: Sequence[Round], engine: str) -> float:
    computed = sum(played.devices[engine]["device_seconds"] for played in rounds)
    return computed / sum(played.seconds for played in rounds)
