"""Find the calls that the end of a run waits for, and their decode time."""

from __future__ import annotations

from collections.abc import Sequence

from flashmoa.observe.calls import Call


def critical_path(calls: Sequence[Call]) -> list[Call]:
    """Return the calls that the end of a run waits for, in their order.

    The path ends with the call that ended last. Before each call stands the last call that had
    ended when this call was sent.
    """
    ended = sorted((call for call in calls if call.finished is not None), key=end_of)
    path: list[Call] = []
    while ended:
        path.append(ended[-1])
        ended = [call for call in ended[:-1] if end_of(call) <= path[-1].started.at]
    return path[::-1]


def end_of(call: Call) -> float:
    """Return when a call ended, or when it was sent if it has not ended."""
    return call.finished.at if call.finished is not None else call.started.at


def decoding_seconds(made: Sequence[Call], started: float) -> float:
    """Return the decode time of the agents on a workflow's critical path.

    They include the first agent's time to first token, since that agent waits for no other. Linking
    cannot make a workflow faster than this unless agents decode faster.

    Args:
        started: time when the workflow began.
    """
    # An answer that came in one piece has no first token.
    path = [(call.first_token or end_of(call), end_of(call)) for call in critical_path(made)]
    return path[0][0] - started + sum(last - first for first, last in path)
