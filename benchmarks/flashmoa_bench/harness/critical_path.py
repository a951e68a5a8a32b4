"""Find the calls that the end of a run waits for (``critical_path``), and what they decode."""

from __future__ import annotations

from collections.abc import Sequence

from flashmoa.observe.calls import Call


def critical_path(calls: Sequence[Call]) -> list[Call]:
    """Return the calls that the end of a run waits for, in their order.

    The last one is the call that ended last; before each stands the one that ended last of those
    that had ended when it was sent.
    """
    ended = sorted((call for call in calls if call.finished is not None), key=end_of)
    path: list[Call] = []
    while ended:
        path.append(ended[-1])
        ended = [call for call in ended[:-1] if end_of(call) <= path[-1].started.at]
    return path[::-1]


def end_of(call: Call) -> float:
    """Return when a call ended; the time of its request if it has not."""
    return call.finished.at if call.finished is not None else call.started.at


def decoding_seconds(made: Sequence[Call], started: float) -> float:
    """Return the seconds in which a workflow's agents on the critical path decode.

    No linking can make a workflow faster than this, if its agents do not decode faster. It includes
    the time to the first token of the path's first agent, which waits for no other.

    Args:
        made: the workflow's calls.
        started: time when the workflow began.
    """
    # An answer that came in one piece has no first token.
    path = [(call.first_token or end_of(call), end_of(call)) for call in critical_path(made)]
    return path[0][0] - started + sum(last - first for first, last in path)
