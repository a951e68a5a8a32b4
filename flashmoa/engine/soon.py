"""Limit requests whose answers are useless later (:class:`SoonAnswers`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

import anyio

from flashmoa import errors

# An engine's HTTP process renders a prompt in milliseconds, even while the engine is busy. For most
# links, an answer that takes longer than this comes too late.
SOON_SECONDS = 2.0
# The HTTP process answers one request at a time. With more requests, the last ones would take long
# although nothing is wrong with the engine.
MAX_IN_FLIGHT = 8
# An engine that did not answer in time is asked again after this time.
RETRY_SECONDS = 10.0


class SoonAnswers:
    """Limits the requests to one engine that prepare prompts.

    Args:
        url: the engine's URL, for errors.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        # Counts the requests in flight, in each event loop.
        self._free = WeakKeyDictionary[asyncio.AbstractEventLoop, anyio.Semaphore]()
        self._answers = 0
        self._silent_until = 0.0  # No request is sent before this time.

    @asynccontextmanager
    async def limit(self) -> AsyncGenerator[None]:
        """Limit the request in the block to :data:`SOON_SECONDS` from its sending.

        The request waits until few others are in flight. An engine that answers none of them in
        this time is left alone for a while: each further request would hold up a connection and the
        links that wait for its answer.

        Raises: EngineTimeout if the engine does not answer in time, or did not lately.
        """
        loop = asyncio.get_running_loop()
        async with self._free.setdefault(loop, anyio.Semaphore(MAX_IN_FLIGHT)):
            if time.monotonic() < self._silent_until:
                raise errors.EngineTimeout(
                    f"{self._url} did not answer in time a moment ago, so it is not asked to "
                    f"prepare prompts for {RETRY_SECONDS:g} s; see the engine's log"
                )
            answers_before = self._answers
            try:
                with anyio.fail_after(SOON_SECONDS):
                    yield
            except TimeoutError as error:
                if self._answers == answers_before:
                    self._silent_until = time.monotonic() + RETRY_SECONDS
                if isinstance(error, errors.EngineTimeout):
                    raise
                raise errors.EngineTimeout(
                    f"{self._url} did not answer within {SOON_SECONDS:g} s; see the engine's log"
                ) from error
            except (errors.RequestRefused, errors.BadAnswer, errors.PluginMissing):
                self._answers += 1
                raise
            self._answers += 1
            self._silent_until = 0.0
