"""``Handover``: hands the tokens of prompt streams over to the schedulers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from typing import TYPE_CHECKING

from flashmoa_sglang.http import metrics
from flashmoa_sglang.http.stream import PromptStream, Span
from flashmoa_sglang.messages import StreamProgress, StreamTokens
from flashmoa_sglang.sglang.options import device_slowdown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashmoa_sglang.http.engine import Engine

logger = logging.getLogger(__name__)

# Tokens gather for this time, so that streams share a message.
_GATHER_SECONDS = 0.002


class Handover:
    """Hands tokens over while streams are open, and notes what schedulers have computed.

    Args:
        streams: the open streams by id, as a view that changes with them.

    Attributes:
        opening: streams to open in their schedulers.
        unclaimed: ids of streams that go on, because their requests were refused.
        changed: set when there may be something to hand over.
    """

    def __init__(self, engine: Engine, streams: Mapping[str, PromptStream]) -> None:
        self._engine = engine
        self._streams = streams
        self.opening: list[PromptStream] = []
        self.unclaimed: list[str] = []
        self.changed = asyncio.Event()
        # Seconds from a stream's end until its scheduler is told of the end. Usually the final
        # request comes at once, and computes the last tokens.
        self._end_grace = 0.01 * device_slowdown()
        engine.handle(StreamProgress, self._note)

    async def run(self) -> None:
        """Open streams and hand over their tokens, until no stream is open."""
        opening: dict[PromptStream, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while self._streams:
                self.changed.clear()
                for stream in self.opening:
                    opening[stream] = group.create_task(self._open_in_scheduler(stream))
                self.opening.clear()
                for stream, task in opening.items():
                    if stream.closed is not None:
                        task.cancel()  # A busy scheduler may answer much later.
                opening = {stream: task for stream, task in opening.items() if not task.done()}
                wait = self._send(time.monotonic())
                await asyncio.sleep(_GATHER_SECONDS)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), wait)
            for task in opening.values():
                task.cancel()

    async def _open_in_scheduler(self, stream: PromptStream) -> None:
        try:
            await self._engine.open_stream(stream.id, stream.terms)
        except Exception as error:
            if stream.closed is not None:
                return
            # The stream stays valid. Whoever reads its id in the log could use the stream.
            text = "A prompt stream is not prefilled: %s. Its request computes the whole prompt."
            logger.warning(text, str(error).removesuffix("."))
            stream.failure = str(error)

    def _send(self, now: float) -> float | None:
        """Send new tokens. Return the seconds until the next end of a stream is due, if any."""
        tokens: list[tuple[str, bytes, bool]] = []
        taken_back: list[tuple[str, int]] = []
        ended: list[str] = []
        wait: float | None = None
        for stream in self._streams.values():
            if not stream.may_grow():
                continue
            known = stream.known()
            if stream.kept < stream.sent:
                taken_back.append((stream.id, stream.kept))
                stream.sent = stream.kept
                stream.prefilled = min(stream.prefilled, stream.kept)
                stream.computed = min(stream.computed, stream.prefilled)
            if len(known) > stream.sent:
                new = array("q", known[stream.sent :])
                tokens.append((stream.id, new.tobytes(), stream.next_seq > 0))
                stream.sent = stream.kept = len(known)
            if stream.ended_at is not None and not stream.end_sent:
                due = stream.ended_at + self._end_grace - now
                if due <= 0:
                    ended.append(stream.id)
                    stream.end_sent = True
                else:
                    wait = min(wait or due, due)
        unclaimed, self.unclaimed = self.unclaimed, []
        if tokens or ended or unclaimed or taken_back:
            message = StreamTokens(tuple(tokens), tuple(ended), tuple(unclaimed), tuple(taken_back))
            self._engine.send(message)
        return wait

    def _note(self, progress: StreamProgress) -> None:
        metrics.count("duplicate_tokens_avoided", progress.duplicates_avoided)
        metrics.count("streams_gave_way", progress.gave_way)
        now = time.time()
        for id_, prefilled, computed, seconds, delay in progress.increments:
            stream = self._streams.get(id_)
            if stream is None:
                continue
            # Tokens whose KV was evicted may be computed again.
            stream.prefilled = prefilled
            stream.computed = min(stream.computed + computed, prefilled)
            if computed:
                stream.increments += 1
                stream.spans.append(Span(now - seconds, now, computed, delay))
                metrics.count("stream_increments")
                metrics.count("stream_tokens_prefilled", computed)
        for id_, waits in progress.waiting:
            if (stream := self._streams.get(id_)) is not None:
                stream.waits_for_room = waits
