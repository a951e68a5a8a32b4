"""Hear what an engine writes for calls while it writes it, on a channel of its own.

The calls stay as they are: each names itself in a header (docs/engine-api.md, "Calls that are
heard"), and :class:`CallChannel` brings their text.
"""

from __future__ import annotations

import logging
import secrets
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import anyio

from flashmoa._concurrency import SingleFlight, TaskHost
from flashmoa.engine import EngineClient
from flashmoa.engine.wire import CALL_HEADER, DYNAMO_HEADER
from flashmoa.errors import EngineError, PluginMissing
from flashmoa.link import reasons

logger = logging.getLogger(__name__)

# Bytes of a channel's id, and of what follows it in the ids of its calls.
_ID_BYTES = 8
_RETRY_SECONDS = 2.0
# A server without the plugin may be replaced by one with it.
_MISSING_SECONDS = 60.0


def unheard_id() -> str:
    """Return an id for a call that no channel hears; a stream may follow the call."""
    return secrets.token_hex(2 * _ID_BYTES)


class CallChannel:
    """Hears one engine's answers to a planner's calls.

    No call waits for the channel. An engine tells a call from the call's beginning, also if the
    channel opens later.

    Args:
        engine: a client of the engine that the calls are sent to.
        host: runs what listens.

    Attributes:
        engine: the client that listens; another one of the same engine may take its place.
        problem: why the engine does not tell what it writes; ``None`` if it does, or has not been
            asked.
    """

    def __init__(self, engine: EngineClient, host: TaskHost) -> None:
        self.problem: str | None = None
        self.engine = engine
        self._id = secrets.token_hex(_ID_BYTES)
        self._calls: dict[str, _HeardCall] = {}
        self._listening = SingleFlight(host, self._listen)
        self._scope = anyio.CancelScope()
        self._is_closed = False
        self._retry_at = 0.0

    def open(self) -> None:
        """Listen in the background until :meth:`close`. Repeating this is harmless."""
        if not self._is_closed and time.monotonic() >= self._retry_at:
            self._listening.start_if_idle()

    def close(self) -> None:
        """Listen no more."""
        self._is_closed = True
        with suppress(RuntimeError):  # The event loop was closed with its tasks.
            self._scope.cancel()

    @contextmanager
    def hearing(self, on_text: Callable[[str], None]) -> Generator[str]:
        """Hear one HTTP request, whose answer is complete when the block is left.

        This may be used in another thread than the event loop's.

        Args:
            on_text: is called in the event loop with each piece of the answer's text.

        Yields: the id of the call, for :meth:`headers`.
        """
        call_id = self._id + secrets.token_hex(_ID_BYTES)
        self._calls[call_id] = _HeardCall(on_text)
        try:
            yield call_id
        finally:
            del self._calls[call_id]

    def headers(self, call_id: str) -> dict[str, str]:
        """Return the headers by which the engine knows a call."""
        name = str(uuid.UUID(hex=call_id))
        return {DYNAMO_HEADER: name} if self.engine.is_front_end else {CALL_HEADER: name}

    async def _listen(self) -> None:
        with anyio.CancelScope() as self._scope:
            try:
                while not self._is_closed:
                    await self._hear(self.engine)
                    await anyio.sleep(_RETRY_SECONDS)
            except PluginMissing:
                await self._hear_workers()
                self.problem = reasons.UNHEARD
                self._retry_at = time.monotonic() + _MISSING_SECONDS
            except RuntimeError as error:  # The client was closed; the next call brings its own.
                logger.debug("A channel ends: %s", error)

    async def _hear_workers(self) -> None:
        """Listen to the engines behind a front end, as long as there are any."""
        heard: set[str] = set()

        async def hear(worker: EngineClient) -> None:
            try:
                with suppress(PluginMissing):
                    await self._hear(worker)
            finally:
                heard.remove(worker.url)

        async with anyio.create_task_group() as group:
            while (workers := await self.engine.workers()) or self.engine.is_front_end:
                for worker in workers:
                    if worker.url not in heard:
                        heard.add(worker.url)
                        group.start_soon(hear, worker)
                await anyio.sleep(_RETRY_SECONDS)
            group.cancel_scope.cancel()

    async def _hear(self, engine: EngineClient) -> None:
        """Listen to an engine until it breaks the channel off. Raises: PluginMissing."""
        try:
            async with engine.hear(self._id) as lines:
                async for line in lines:
                    self.problem = None
                    self._take(line)
        except PluginMissing:
            raise
        except EngineError as error:
            self.problem = f"its engine's channel is broken: {error}".removesuffix(".")
            logger.debug("A channel is opened again: %s", error)

    def _take(self, line: Mapping[str, Any]) -> None:
        call = self._calls.get(str(line.get("call")))
        # Engines behind a front end that parses answers have text without parts.
        text: object = line.get("content", line.get("text"))
        at: object = line.get("at")
        if call is not None and isinstance(text, str) and isinstance(at, int):
            call.take(text, at)


class _HeardCall:
    """Receives the text of one call in order."""

    def __init__(self, on_text: Callable[[str], None]) -> None:
        self._on_text = on_text
        self._heard = 0

    def take(self, text: str, at: int) -> None:
        """Pass on what is new in a text.

        Args:
            at: the number of characters before the text. Where some of these are missing, since
                the channel was away, nothing more is passed on.
        """
        new = text[self._heard - at :] if at <= self._heard else ""
        if new:
            self._heard += len(new)
            self._on_text(new)
