"""When buffered tokens are prefilled, and how many: a pure decision.

The criterion C of FlashAgents §3.1 (enough tokens, end of the stream, engine idle), taken for
all streams of an engine together: whenever no increment is running, everything that is due
goes out at once and is batched by the scheduler. So increments grow by themselves when the
engine falls behind, and are small when it has time.
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


@dataclass(frozen=True, slots=True)
class Policy:
    """Bounds of an increment, in tokens and seconds.

    ``chunk``: the most tokens in one go, over all streams. A request that arrives meanwhile
    waits for them, so it is what a stream can cost its neighbours at worst; ``lone_chunk``
    where there is one stream only, and so nobody else's request to expect.
    """

    idle_tokens: int = 16
    shared_tokens: int = 32
    chunk: int = 512
    lone_chunk: int = 2048
    shared_chunk: int = 128
    # Of the engine's time, while other requests are running.
    share: float = 0.2
    # The real request usually follows the end at once and carries the rest along.
    end_grace: float = 0.01


@dataclass(frozen=True, slots=True)
class Due(Generic[S]):
    """``increments``: streams and how far to prefill each. ``wait``: seconds until the next
    look if nothing changes before, or ``None``."""

    increments: tuple[tuple[S, int], ...]
    wait: float | None = None


def due(
    streams: Iterable[S],
    policy: Policy,
    *,
    now: float,
    shared: bool,
    alone: bool,
    resume_at: float,
) -> Due[S]:
    """What to prefill now.

    Args:
        streams: those that may be prefilled further.
        shared: whether other requests are running on the engine.
        alone: whether this is the engine's only stream.
        resume_at: with others running, not before this time.
    """
    need = policy.shared_tokens if shared else policy.idle_tokens
    ready: list[tuple[int, S]] = []
    wait: float | None = None
    for stream in streams:
        fresh = stream.certain_tokens() - stream.prefilled
        if fresh <= 0:
            continue
        if stream.ended_at is None and fresh < need:
            continue
        not_before = stream.stalled_until
        if stream.ended_at is not None:
            not_before = max(not_before, stream.ended_at + policy.end_grace)
        if not_before > now:
            wait = min(wait or not_before - now, not_before - now)
            continue
        ready.append((fresh, stream))
    if not ready:
        return Due((), wait)
    if shared and now < resume_at:
        return Due((), resume_at - now)
    chunk = policy.lone_chunk if alone else policy.chunk
    return Due(_share_out(ready, policy.shared_chunk if shared else chunk))


def _share_out(ready: list[tuple[int, S]], budget: int) -> tuple[tuple[S, int], ...]:
    """The least remaining first: it is finished soonest, and so is its agent."""
    chosen: list[tuple[S, int]] = []
    for fresh, stream in sorted(ready, key=lambda item: item[0]):
        if budget <= 0:
            break
        tokens = min(fresh, budget)
        chosen.append((stream, stream.prefilled + tokens))
        budget -= tokens
    return tuple(chosen)
