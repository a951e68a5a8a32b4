"""A run in a few figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from flashmoa.observe.calls import Call
from flashmoa.observe.events import CallFailed
from flashmoa.observe.overlap import Overlap, overlaps

OVERLAP = """\
Prefilled ahead: the time in which the engine prefilled a call's prompt stream before the call's \
request went out, and the tokens it computed. The time is that of the stream's prefill spans, cut \
at the request; a span has in it that the prefill waited for its turn and shared forwards with \
others. Streams that the call did not hit do not count. Under decode: the part of that time in \
which another call was decoding, first token to last. Left: from the request to its first token, \
which is the rest of the prefill, the queue, the network and one decode step. So this is time of \
engine prefill taken off the path between two agents, added up over calls. It is no measured \
comparison with a run without links; flashmoa bench workflows makes one."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Seconds, and numbers of calls.

    ``end_to_end``: from the first request to the end of the last call. ``first_token``: median
    over the calls, from request to first token; ``None`` without any. ``overlap``: the sum over
    the ``linked`` calls, which found their prompt streams.
    """

    end_to_end: float
    calls: int
    failed: int
    first_token: float | None
    linked: int
    overlap: Overlap

    def __str__(self) -> str:
        overlap = self.overlap
        return (
            f"end to end {seconds(self.end_to_end)}; {self.linked:,} of {self.calls:,} calls found "
            f"their prompt streams: {overlap.ahead_tokens:,} of their tokens were prefilled ahead, "
            f"{overlap.left_tokens:,} tokens and {seconds(overlap.left)} to their first tokens "
            "were left"
        )


def summary(found: Sequence[Call]) -> Summary:
    """Of the calls of a run."""
    starts = [call.started.at for call in found]
    ends = [call.ended.at for call in found if call.ended is not None]
    waits = [call.first_token - call.started.at for call in found if call.first_token is not None]
    hits = overlaps(found).values()
    return Summary(
        end_to_end=max(ends) - min(starts) if ends else 0.0,
        calls=len(found),
        failed=sum(isinstance(call.ended, CallFailed) for call in found),
        first_token=median(waits) if waits else None,
        linked=len(hits),
        overlap=Overlap(
            ahead=sum(one.ahead for one in hits),
            under_decode=sum(one.under_decode for one in hits),
            left=sum(one.left for one in hits),
            ahead_tokens=sum(one.ahead_tokens for one in hits),
            left_tokens=sum(one.left_tokens for one in hits),
        ),
    )


def seconds(value: float) -> str:
    """For readers: ``412 ms``, ``3.21 s``, ``39 min 37 s``."""
    if abs(value) < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 600:
        return f"{value:.2f} s"
    return f"{int(value // 60)} min {int(value % 60)} s"
