"""All prompt streams of a server, in its HTTP process: trigger and lifetime.

A stream is an append-only prompt whose KV is built while it grows (FlashAgents §3.1,
Algorithm 1). All timing is decided here, in one process (``trigger.py`` says when); the
schedulers see ordinary prefill requests. One task serves all streams while any is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashmoa_sglang import metrics
from flashmoa_sglang.engine import Superseded, new_rid
from flashmoa_sglang.errors import (
    Draining,
    EngineBusy,
    OutOfOrder,
    StreamGone,
    TooLarge,
    TooManyStreams,
    UnknownStream,
)
from flashmoa_sglang.keeper import Keeper
from flashmoa_sglang.stream import Ending, PromptStream, Span
from flashmoa_sglang.trigger import Policy, due

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashmoa_sglang.engine import Engine, Prefilled

logger = logging.getLogger(__name__)

_LIFETIME_CHECK = 0.1
_PAUSE_WHEN_BUSY = 0.1


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what clients may ask; reported by ``GET /flashmoa/info``."""

    streams: int = 256
    ttl_seconds: float = 3600.0
    default_ttl_seconds: float = 120.0
    # A prompt of more characters than this per token of context cannot be text.
    characters_per_token: int = 64
    remembered: int = 4096


class StreamTable:
    """All open prompt streams of a server."""

    def __init__(
        self, engine: Engine, limits: Limits | None = None, policy: Policy | None = None
    ) -> None:
        self.limits = limits or Limits()
        self._policy = policy or Policy()
        self._engine = engine
        self._open: dict[str, PromptStream] = {}
        self._ended: OrderedDict[str, Ending] = OrderedDict()
        self._changed = asyncio.Event()
        self._keeper = Keeper(lambda: bool(self._open), self._fail)
        self._resume_at = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def all(self) -> list[PromptStream]:
        return list(self._open.values())

    def get(self, stream_id: str) -> PromptStream:
        """Raises: UnknownStream, StreamGone."""
        stream = self._open.get(stream_id)
        if stream is not None:
            return stream
        ending = self._ended.get(stream_id)
        if ending is not None:
            raise StreamGone(
                f"Prompt stream {stream_id} is gone: {ending}. Open a new one.", reason=ending
            )
        raise UnknownStream(f"There is no prompt stream {stream_id}. Open one first.")

    def find(self, stream_id: str) -> tuple[PromptStream | None, str]:
        """For a final request, to which the id is only a hint: the stream, or why not."""
        stream = self._open.get(stream_id)
        if stream is not None and not stream.claimed:
            return stream, "open"
        if stream is not None:
            return None, "used"
        return None, self._ended.get(stream_id, "unknown")

    def open(self, stream: PromptStream) -> None:
        """Start a stream. Raises: TooManyStreams, Draining."""
        if self._engine.draining:
            raise Draining("The server is shutting down; use another engine.")
        if len(self._open) >= self.limits.streams:
            raise TooManyStreams(
                f"{self.limits.streams} prompt streams are open, which is the limit. "
                "Delete some, or send the request without one."
            )
        self._open[stream.id] = stream
        metrics.streams_open(len(self._open))
        metrics.buffered(stream.certain_tokens())
        self._touch(stream)
        self._keeper.keep("prompt-streams", self._run)
        # By itself, so that no stream outlives its time because another one is prefilled.
        self._keeper.keep("prompt-stream-lifetimes", self._watch_lifetimes)

    def add(self, stream: PromptStream, piece: str | list[int], end: bool = False) -> None:
        """Buffer text or token ids; ``end``: the last ones.

        Raises:
            TooLarge: with the stream as it was before.
        """
        room = self._engine.max_prompt_tokens
        if stream.buffer is None:
            assert not isinstance(piece, str)
            if len(stream.ids) + len(piece) > room:
                raise _over_context(room)
            stream.ids.extend(piece)
            return
        assert isinstance(piece, str)
        if len(stream.buffer.text) + len(piece) > room * self.limits.characters_per_token:
            raise _over_context(room)
        before = stream.buffer.checkpoint()
        stream.buffer.append(piece)
        # What is held back counts once nothing can change it any more.
        tokens = stream.buffer.all_tokens() if end else stream.buffer.tokens
        if len(tokens) > room:
            stream.buffer.restore(before)
            raise _over_context(room)

    def append(self, stream: PromptStream, seq: int, piece: str | list[int], end: bool) -> None:
        """Add the ``seq``-th piece, once. Raises: OutOfOrder, StreamGone, TooLarge, Draining."""
        if stream.claimed:
            raise StreamGone(f"Prompt stream {stream.id} is in use by its request.", reason="used")
        if seq < stream.next_seq:
            return
        if self._engine.draining:
            raise Draining("The server is shutting down; send the whole request elsewhere.")
        if stream.ended_at is not None:
            raise OutOfOrder(f"Prompt stream {stream.id} has ended; open a new one.")
        if seq > stream.next_seq:
            raise OutOfOrder(
                f"Append {seq} came before append {stream.next_seq}; send the missing ones "
                "first, in order.",
                expected_seq=stream.next_seq,
            )
        certain = stream.certain_tokens()
        if piece or (end and stream.buffer is not None):
            self.add(stream, piece, end)
        stream.next_seq += 1
        if end:
            stream.ended_at = time.monotonic()
        metrics.buffered(stream.certain_tokens() - certain)
        self._touch(stream)

    def claim(self, stream: PromptStream) -> None:
        """The real request is here: no further increments; it will compute the rest."""
        stream.claimed = True
        self._changed.set()

    def unclaim(self, stream: PromptStream) -> None:
        """The real request was refused; the stream goes on as if it had not come."""
        stream.claimed = False
        self._touch(stream)

    def close(self, stream: PromptStream, ending: Ending) -> None:
        """End a stream and give its KV back to the cache; harmless to repeat."""
        if stream.closed is not None:
            return
        stream.closed = ending
        del self._open[stream.id]
        self._ended[stream.id] = ending
        metrics.streams_open(len(self._open))
        metrics.ended(ending)
        if len(self._ended) > self.limits.remembered:
            self._ended.popitem(last=False)
        if stream.rid is not None:
            self._engine.abort(stream.rid)
        # Behind the abort in the same queue, so nothing of the stream is pinned after it.
        self._engine.release(stream.id)
        self._changed.set()

    def _touch(self, stream: PromptStream) -> None:
        stream.deadline = time.monotonic() + stream.ttl_seconds
        self._changed.set()

    def _fail(self, error: Exception) -> None:
        """A mistake of ours must not leave streams that nobody serves and nobody ends."""
        for stream in self.all():
            stream.failure = stream.failure or f"{type(error).__name__}: {error}"

    async def _watch_lifetimes(self) -> None:
        while self._open:
            self._expire(time.monotonic())
            # Often enough: draining is a flag that SGLang sets and tells nobody about.
            await asyncio.sleep(_LIFETIME_CHECK)

    async def _run(self) -> None:
        """While streams are open: prefill what is due."""
        while self._open:
            self._changed.clear()
            now = time.monotonic()
            shared = self._engine.others_active()
            growing = (stream for stream in self._open.values() if stream.may_grow())
            todo = due(
                growing,
                self._policy,
                now=now,
                shared=shared,
                alone=len(self._open) == 1,
                resume_at=self._resume_at,
            )
            if todo.increments:
                await self._prefill(todo.increments, shared)
            elif self._open:
                await _wait(self._changed, todo.wait)

    def _expire(self, now: float) -> None:
        for stream in self.all():
            if self._engine.draining and not stream.claimed:
                self.close(stream, "drained")
                continue
            if now >= stream.deadline and not stream.claimed:
                logger.info("Prompt stream %s expired after %.0f s", stream.id, stream.ttl_seconds)
                self.close(stream, "expired")

    async def _prefill(self, increments: Sequence[tuple[PromptStream, int]], shared: bool) -> None:
        started = time.monotonic()
        await asyncio.gather(*(self._increment(stream, target) for stream, target in increments))
        if shared:
            now = time.monotonic()
            self._resume_at = now + (now - started) * (1 / self._policy.share - 1)

    async def _increment(self, stream: PromptStream, target: int) -> None:
        stream.rid = new_rid()
        try:
            done = await self._engine.prefill(
                stream.certain()[:target],
                stream=stream.id,
                rid=stream.rid,
                terms=stream.terms,
            )
        except Superseded:
            return
        except EngineBusy:
            await asyncio.sleep(_PAUSE_WHEN_BUSY)
            return
        except Exception as error:
            # The stream stays valid: its request computes what is missing.
            logger.warning("Prompt stream %s stops prefilling: %s", stream.id, error)
            stream.failure = str(error)
            return
        finally:
            stream.rid = None
        self._account(stream, done)

    def _account(self, stream: PromptStream, done: Prefilled) -> None:
        stream.increments += 1
        now = time.time()
        computed = done.prompt_tokens - done.cached_tokens
        stream.spans.append(Span(now - done.seconds, now, computed))
        stream.prefilled = done.prompt_tokens
        stream.computed += computed
        metrics.prefilled(computed)


def _over_context(room: int) -> TooLarge:
    return TooLarge(
        f"The prompt would not fit this server: {room} tokens are the most. "
        "Nothing of this piece was taken.",
        max_tokens=room,
    )


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
