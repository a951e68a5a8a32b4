"""What linking took off the path between two agents: prefill that ran ahead of the call it was for.

A call's prompt stream says when the engine prefilled it. What of that lies before the call went
out is ahead of it; what remains is the time from the call to its first token. That is no time
saved: a prefill's span has in it that it waited for its turn and shared forwards with others, and
what a run without links takes is only known from one (``flashmoa bench workflows``). Engine and
client stamp their times with their own clocks; on two machines these must agree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashmoa.observe.calls import Call

_Intervals = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of one call that found its prompt stream (``hit``), in seconds and prompt tokens.

    ``ahead``: its stream's prefills before the request went out; ``under_decode``: of these,
    while another call was decoding; ``left``: from the request to the first token, which is the
    rest of the prefill, the queue, the network and one decode step. ``ahead_tokens`` were
    computed by the stream, ``left_tokens`` after the request came.
    """

    ahead: float
    under_decode: float
    left: float
    ahead_tokens: int
    left_tokens: int


def overlaps(found: Sequence[Call]) -> dict[str, Overlap]:
    """By ``call_id``, for the calls of a run that found their prompt streams.

    A call's own decode is after its prefill, so all decodes stand for those of others.
    """
    decodes = _union(
        (call.first_token, call.ended.at)
        for call in found
        if call.first_token is not None and call.ended is not None
    )
    of = {call.started.call_id: _overlap(call, decodes) for call in found}
    return {call_id: overlap for call_id, overlap in of.items() if overlap is not None}


def _overlap(call: Call, decodes: _Intervals) -> Overlap | None:
    usage, sent = call.usage, call.started.at
    stream = usage.prompt_stream if usage is not None else None
    if usage is None or stream is None or stream.status != "hit" or call.first_token is None:
        return None
    spans = _union((span.start, min(span.end, sent)) for span in stream.prefills)
    return Overlap(
        ahead=sum(end - start for start, end in spans),
        under_decode=sum(_within(decodes, start, end) for start, end in spans),
        left=call.first_token - sent,
        ahead_tokens=usage.streamed_tokens or 0,
        left_tokens=usage.late_tokens or 0,
    )


def _union(intervals: Iterable[tuple[float, float]]) -> _Intervals:
    """The same times as disjoint intervals in order; empty ones are left out."""
    merged: _Intervals = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _within(disjoint: _Intervals, start: float, end: float) -> float:
    """Seconds of ``disjoint`` between ``start`` and ``end``."""
    total = 0.0
    first = max(0, bisect_right(disjoint, (start, start)) - 1)
    for left, right in disjoint[first:]:
        if left >= end:
            break
        total += max(0.0, min(right, end) - max(left, start))
    return total
