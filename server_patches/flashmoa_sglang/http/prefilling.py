"""``Prefiller``: computes the increments of prompt streams when they are due."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from flashmoa_sglang.http import metrics
from flashmoa_sglang.http.engine import new_rid
from flashmoa_sglang.http.errors import EngineBusy
from flashmoa_sglang.http.stream import NoRoom, Span, Superseded
from flashmoa_sglang.http.trigger import END_GRACE, Policy, due
from flashmoa_sglang.options import Options
from flashmoa_sglang.scheduler.policy import chunk_tokens

if TYPE_CHECKING:
    from collections.abc import Collection

    from flashmoa_sglang.http.engine import Engine
    from flashmoa_sglang.http.stream import Prefilled, PromptStream

logger = logging.getLogger(__name__)

# How long a stream waits, after the engine was too busy for an increment, before it tries again.
_STALL_SECONDS = 1.0
# The fewest tokens in an increment that is worth its overhead: with one stream, and with many.
_LEAST, _MOST_WORTH = 8, 32


class Prefiller:
    """Prefills streams as they grow, one increment of each at a time.

    Args:
        streams: the open streams, as a view that changes with them.
    """

    def __init__(self, engine: Engine, streams: Collection[PromptStream]) -> None:
        self._engine = engine
        self._streams = streams
        self._changed = asyncio.Event()
        self._slowdown = Options.from_environment().device_slowdown

    def look(self) -> None:
        """Look again for due increments, because a stream has grown, ended or closed."""
        self._changed.set()

    async def run(self) -> None:
        """Compute the increments that are due, until no stream is open."""
        async with asyncio.TaskGroup() as group:
            while self._streams:
                self._changed.clear()
                now = time.monotonic()
                todo = due(
                    [stream for stream in self._streams if stream.may_grow() and not stream.rid],
                    self._policy(),
                    now=now,
                    alone=len(self._streams) == 1 and not self._engine.others_active(),
                )
                for stream, target in todo.increments:
                    stream.rid = new_rid()
                    group.create_task(self._increment(stream, target))
                await _wait(self._changed, todo.wait)

    def _policy(self) -> Policy:
        page = self._engine.page_size
        # Each increment costs a few milliseconds in addition to the time of its tokens. So with
        # many streams increments are larger.
        least = min(max(_LEAST, 2 * len(self._streams)), _MOST_WORTH)
        chunk = chunk_tokens(self._engine.costs, page)
        return Policy(least, chunk, page, END_GRACE * self._slowdown)

    async def _increment(self, stream: PromptStream, target: int) -> None:
        offers = stream.offers
        try:
            if not stream.may_grow():  # The stream has ended since this task was created.
                return
            done = await self._engine.prefill(
                stream.certain()[:target],
                stream=stream.id,
                rid=stream.rid,
                terms=stream.terms,
            )
            self._account(stream, done)
        except Superseded:
            return
        except NoRoom:
            # The message that there is room may have come before this refusal.
            stream.waits_for_room = stream.offers == offers
        except EngineBusy:
            stream.stalled_until = time.monotonic() + _STALL_SECONDS * self._slowdown
        except Exception as error:
            # The stream stays valid: its final request computes the missing tokens.
            text = "Prompt stream %s stops prefilling: %s. Its request computes the rest."
            logger.warning(text, stream.id, str(error).removesuffix("."))
            stream.failure = str(error)
        finally:
            stream.rid = None
            self.look()

    def _account(self, stream: PromptStream, done: Prefilled) -> None:
        stream.increments += 1
        now = time.time()
        computed = done.prompt_tokens - done.cached_tokens
        stream.spans.append(Span(now - done.seconds, now, computed))
        stream.prefilled = done.prompt_tokens
        stream.computed += computed
        metrics.count("stream_increments")
        metrics.count("stream_tokens_prefilled", computed)


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
