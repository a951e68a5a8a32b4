"""Compute how fast a workflow could be at best, from the calls on its critical path."""

from __future__ import annotations

from collections.abc import Sequence

from flashmoa.observe.calls import Call
from flashmoa.plan.bound import critical_path


def decoding_seconds(made: Sequence[Call], started: float) -> float:
    """Return the seconds in which a workflow's agents on the critical path decode.

    No linking can make a workflow faster than this, if its agents do not decode faster. It includes
    the time to the first token of the path's first agent, which waits for no other.

    Args:
        made: the workflow's calls.
        started: time when the workflow began.
    """
    # An answer that came in one piece has no first token.
    path = [
        (call.first_token or call.finished.at, call.finished.at)
        for call in critical_path(made)
        if call.finished is not None
    ]
    return path[0][0] - started + sum(last - first for first, last in path)
