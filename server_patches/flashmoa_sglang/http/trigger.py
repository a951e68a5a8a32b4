"""When buffered tokens are prefilled, how many, and when clients append next: pure decisions.

The criterion C of FlashAgents §3.1 (enough tokens, end of the stream, engine idle), for each
stream that has no increment running. So increments grow by themselves when the engine falls
behind, and are small when it has time. How increments share a forward, and how they give way
to decoding and to requests, is the scheduler's business.

Answering an append takes the HTTP process some half of a millisecond, which on a CPU is taken
from a forward. So each answer names a time at which no other client was asked to append.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Buffered(Protocol):
    """What the decision needs to know of a stream."""

    prefilled: int
    ended_at: float | None
    stalled_until: float

    def certain_tokens(self) -> int: ...


S = TypeVar("S", bound=Buffered)
# Seconds between two appends of different streams, and between two of the same.
_APART = 0.02
_SOONEST, _LATEST = 0.04, 0.25


@dataclass(frozen=True, slots=True)
class Policy:
    """Bounds of an increment, in tokens and seconds.

    ``chunk``: the most tokens in one go. A request that arrives meanwhile waits for them, so
    it is what streams can cost their neighbours at worst; ``lone_chunk`` where there is one
    stream only, and so no other request to expect. ``page``: tokens per KV page.
    """

    least: int = 16
    chunk: int = 512
    page: int = 1
    # The real request usually follows the end at once and carries the rest along.
    end_grace: float = 0.01

    @property
    def lone_chunk(self) -> int:
        return 4 * self.chunk


@dataclass(frozen=True, slots=True)
class Due(Generic[S]):
    """``increments``: streams and how far to prefill each. ``wait``: seconds until the next
    look if nothing changes before, or ``None``."""

    increments: tuple[tuple[S, int], ...]
    wait: float | None = None


def due(streams: Iterable[S], policy: Policy, *, now: float, alone: bool) -> Due[S]:
    """Choose what to prefill now, the least remaining first.

    Args:
        streams: those that may be prefilled further and have no increment running.
        alone: whether this is the engine's only stream, and no other request runs.
    """
    chunk = policy.lone_chunk if alone else policy.chunk
    ready: list[tuple[int, S, int]] = []
    wait: float | None = None
    for stream in streams:
        target = _target(stream, policy, max(chunk, policy.page))
        if target is None:
            continue
        not_before = stream.stalled_until
        if stream.ended_at is not None:
            not_before = max(not_before, stream.ended_at + policy.end_grace)
        if not_before > now:
            wait = min(wait or not_before - now, not_before - now)
        else:
            ready.append((stream.certain_tokens() - stream.prefilled, stream, target))
    ready.sort(key=lambda item: item[0])
    return Due(tuple((stream, target) for _, stream, target in ready), wait)


def _target(stream: Buffered, policy: Policy, chunk: int) -> int | None:
    """Return how far to prefill a stream; ``None``: it is not worth it yet."""
    certain = stream.certain_tokens()
    if stream.ended_at is None:
        # Part of a page is not kept, so it would be computed again.
        certain -= certain % policy.page
        if certain - stream.prefilled < policy.least:
            return None
    if certain <= stream.prefilled:
        return None
    return min(certain, stream.prefilled + chunk - chunk % policy.page)


class Pace:
    """Spreads the appends of all streams evenly. Times in seconds of any one clock."""

    def __init__(self) -> None:
        self._last = 0.0

    def next(self, now: float, streams: int, busy: bool) -> float:
        """Return how long the stream that has just appended should gather text.

        Args:
            streams: how many are open.
            busy: whether others' requests are running; increments are seconds apart then,
                and what is appended in between would only wait.
        """
        around = _LATEST if busy else min(max(_APART * streams, _SOONEST), _LATEST)
        turn = max(self._last + around / max(streams, 1), now + _SOONEST)
        self._last = min(turn, now + _LATEST)
        return self._last - now
