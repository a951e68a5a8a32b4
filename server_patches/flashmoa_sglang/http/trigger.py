"""Decides when buffered tokens are prefilled and how many (``due``), and the pace of appends.

``due`` is criterion C of FlashAgents §3.1 (enough tokens, end of the stream, engine idle) for each
stream that has no increment running. So increments grow by themselves when the engine is slow, and
are small when it has time. The scheduler decides how increments share a forward, and how they yield
to decoding and to requests.

Answering an append takes the HTTP process about half a millisecond, and on a CPU it takes that from
a forward. So each answer names a time for the next append at which no other client appends
(``Pace``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Buffered(Protocol):
    """The attributes of a stream on which the decision depends."""

    prefilled: int
    ended_at: float | None
    stalled_until: float

    def certain_tokens(self) -> int: ...


S = TypeVar("S", bound=Buffered)
# Seconds after a stream's end in which its last tokens are not prefilled.
END_GRACE = 0.01
# Seconds between two appends of different streams.
_APART = 0.02
# The least and the most seconds between two appends of the same stream.
_SOONEST, _LATEST = 0.04, 0.25


@dataclass(frozen=True, slots=True)
class Policy:
    """Bounds of an increment, in tokens and seconds.

    Attributes:
        least: the fewest tokens in an increment, unless it ends its stream.
        chunk: the most tokens in an increment. A request that arrives while the increment is
            computed waits for it, so this limits the delay that streams cause.
        page: tokens in a KV page.
        end_grace: seconds after a stream's end in which its last tokens are not prefilled: usually
            the final request comes at once and computes them.
    """

    least: int = 16
    chunk: int = 512
    page: int = 1
    end_grace: float = END_GRACE

    @property
    def lone_chunk(self) -> int:
        """The most tokens in an increment of the only stream, with no other request to delay."""
        return 4 * self.chunk


@dataclass(frozen=True, slots=True)
class Due(Generic[S]):
    """The increments to compute now.

    ``increments``: streams, and the number of tokens up to which each is prefilled. ``wait``:
    seconds after which to decide again if no stream changes before; ``None``: not at all.
    """

    increments: tuple[tuple[S, int], ...]
    wait: float | None = None


def due(streams: Iterable[S], policy: Policy, *, now: float, alone: bool) -> Due[S]:
    """Choose the increments to compute now, with the fewest remaining tokens first.

    Args:
        streams: the streams that may be prefilled further and have no increment running.
        alone: whether there is only one stream, and no other request runs.
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
    """Return up to which token to prefill a stream; ``None`` if that is not worth it yet."""
    certain = stream.certain_tokens()
    if stream.ended_at is None:
        # SGLang does not cache a part of a page, so it would be computed again.
        certain -= certain % policy.page
        if certain - stream.prefilled < policy.least:
            return None
    if certain <= stream.prefilled:
        return None
    return min(certain, stream.prefilled + chunk - chunk % policy.page)


class Pace:
    """Spreads the appends of all streams evenly. Times are in seconds, of any one clock.

    Args: slowdown: factor of all intervals, for a modelled GPU that is slowed down.
    """

    def __init__(self, slowdown: float = 1.0) -> None:
        self._slowdown = slowdown
        self._last = 0.0

    def next(self, now: float, streams: int, busy: bool) -> float:
        """Return how long the stream that has just appended should gather text.

        Args:
            streams: number of open streams.
            busy: whether other requests are running. Increments are then computed so rarely that
                text which is appended more often would only wait.
        """
        soonest, latest = _SOONEST * self._slowdown, _LATEST * self._slowdown
        apart = _APART * self._slowdown * streams
        interval = latest if busy else min(max(apart, soonest), latest)
        next_turn = max(self._last + interval / max(streams, 1), now + soonest)
        self._last = min(next_turn, now + latest)
        return self._last - now
