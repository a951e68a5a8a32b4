"""Hear an engine's answers while it writes them, on a separate channel (:class:`CallChannel`).

The calls stay as they are: each names itself in a header (docs/engine-api.md, "Calls that are
heard").
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

RETRY_SECONDS = 2.0


def unheard_id() -> str:
    """Return an id for a call that no channel hears; a stream may follow the call."""
    return secrets.token_hex(16)


class CallChannel:
    """Hears one engine's answers to a planner's calls.

    No call waits for the channel. An engine tells a call from the call's beginning, also if the
    channel opens later.

    Args:
        engine: a client of the engine that the calls are sent to.
        host: runs the listening task.

    Attributes:
        engine: the client that listens; another client of the same engine may replace it.
        problem: why the engine does not send its text; ``None`` if it does, or was not asked.
    """

    def __init__(self, engine: EngineClient, host: TaskHost) -> None:
        self.problem: str | None = None
        self.engine = engine
        self._id = secrets.token_hex(8)
        self._calls: dict[str, Callable[[str, int], None]] = {}
        self._listening = SingleFlight(host, self._listen)
        self._scope = anyio.CancelScope()
        self._is_closed = False
        self._retry_at = 0.0

    def open(self) -> None:
        """Listen in the background until :meth:`close`. Repeating this is harmless."""
        if time.monotonic() >= self._retry_at:
            self._listening.start_if_idle()

    def close(self) -> None:
        self._is_closed = True
        with suppress(RuntimeError):  # The event loop was closed with its tasks.
            self._scope.cancel()

    @contextmanager
    def hearing(self, on_text: Callable[[str], None]) -> Generator[str]:
        """Hear one HTTP request, whose answer is complete when the block is left.

        This may be used in another thread than the event loop's.

        Args:
            on_text: is called in the event loop with each part of the answer's text.

        Yields: the id of the call, for :meth:`headers`.
        """
        call_id = self._id + secrets.token_hex(8)
        heard = 0

        def take(text: str, at: int) -> None:
            """Pass on the new part of a text that starts at character ``at`` of the answer."""
            nonlocal heard
            # If the channel has missed a character, nothing more is passed on.
            if at <= heard and (new := text[heard - at :]):
                heard += len(new)
                on_text(new)

        self._calls[call_id] = take
        try:
            yield call_id
        finally:
            del self._calls[call_id]

    def headers(self, call_id: str) -> dict[str, str]:
        """Return the headers that name a call to the engine."""
        name = str(uuid.UUID(hex=call_id))
        return {DYNAMO_HEADER: name} if self.engine.is_front_end else {CALL_HEADER: name}

    async def _listen(self) -> None:
        with anyio.CancelScope() as self._scope:
            try:
                while not self._is_closed:
                    await self._hear(self.engine)
                    await anyio.sleep(RETRY_SECONDS)
            except PluginMissing:
                await self._hear_workers()
                self.problem = reasons.UNHEARD
                # A server with the plugin may replace the server in a minute.
                self._retry_at = time.monotonic() + 60.0
            except RuntimeError as error:  # The client was closed; the next call brings its own.
                logger.debug("A channel ends: %s", error)

    async def _hear_workers(self) -> None:
        """Listen to the engines behind a front end while it has any."""
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
                await anyio.sleep(RETRY_SECONDS)
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
        take = self._calls.get(str(line.get("call")))
        # Engines behind a front end that parses answers send the unparsed ``text``.
        text: object = line.get("content", line.get("text"))
        at: object = line.get("at")
        if take is not None and isinstance(text, str) and isinstance(at, int):
            take(text, at)
