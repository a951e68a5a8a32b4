"""Compute what links could save at most in a run without them (``bound``).

The end of a run waits for some of its calls only: the last one, the one whose end that one waited
for, and so on (``critical_path``). Between two of them the run waits for the later one's prompt to
be prefilled. Links could at best have prefilled all of it before, since it consists of text that
was known when the run began, and of text that was written by then; only one step of the engine is
left, for the last token. There has to be time for it, too: as long as the run had lasted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashmoa.observe.calls import Call


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


def critical_path(calls: Sequence[Call]) -> list[Call]:
    """Return the calls that the end of a run waits for, in their order.

    The last one is the call that ended last; before each stands the one that ended last of those
    that had ended when it was sent.
    """
    ended = sorted((call for call in calls if call.finished is not None), key=_end)
    path: list[Call] = []
    while ended:
        path.append(ended[-1])
        ended = [call for call in ended[:-1] if _end(call) <= path[-1].started.at]
    return path[::-1]


def waits(
    calls: Sequence[Call], steps: Mapping[str, float], path: Sequence[Call] | None = None
) -> list[Wait]:
    """Return what a run waited for in each call of its critical path; see :class:`Wait`.

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


def bound(run: Sequence[Wait]) -> float:
    """Return the seconds that links could save at most in a run."""
    return sum(wait.avoidable for wait in run)


def _wait(call: Call, turn: int, begin: float, step: float) -> Wait:
    usage, sent = call.usage, call.started.at
    steps = max(0, usage.completion_tokens - 1) if usage is not None else 0
    decode = _end(call) - (call.first_token or _end(call))
    # A step is never much faster than one of a single request.
    is_estimated = decode < steps * step / 2
    if is_estimated:
        decode = min(steps * step, _end(call) - sent)
    prefill = _end(call) - sent - decode
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


def _end(call: Call) -> float:
    return call.finished.at if call.finished is not None else call.started.at
