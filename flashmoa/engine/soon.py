"""Limit requests whose answers are of no use later (:class:`SoonAnswers`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

import anyio

from flashmoa import errors

# What an engine's HTTP process does by itself, such as rendering a prompt, takes it milliseconds,
# also while the engine is busy. What takes longer than this comes too late for most links.
SOON_SECONDS = 2.0
# How many of these requests an engine gets at once: its HTTP process answers them one by one, so
# that of more the last ones would take long although nothing is wrong with it.
MOST_AT_ONCE = 8
# For how long an engine that took longer is not asked again.
_SILENT_SECONDS = 10.0


class SoonAnswers:
    """Limits the requests to one engine that prepare prompts.

    Args:
        url: the engine's, for errors.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        # The requests that may still be sent at once, in each event loop.
        self._free = WeakKeyDictionary[asyncio.AbstractEventLoop, anyio.Semaphore]()
        self._answers = 0
        self._silent_until = 0.0  # No request is sent before.

    @asynccontextmanager
    async def limit(self) -> AsyncGenerator[None]:
        """Limit a request in the block to :data:`SOON_SECONDS` from its sending.

        It waits until few others are on their way to the engine. An engine that answers none of
        them by then is not asked again for a few seconds: each request would hold a connection, and
        the links that wait for it.

        Raises: EngineTimeout if the engine does not answer by then, or has not answered lately.
        """
        loop = asyncio.get_running_loop()
        async with self._free.setdefault(loop, anyio.Semaphore(MOST_AT_ONCE)):
            if time.monotonic() < self._silent_until:
                raise errors.EngineTimeout(
                    f"{self._url} did not answer in time a moment ago, so it is not asked to "
                    f"prepare prompts for {_SILENT_SECONDS:g} s; see the engine's log"
                )
            answers_before = self._answers
            try:
                with anyio.fail_after(SOON_SECONDS):
                    yield
            except TimeoutError as error:
                if self._answers == answers_before:
                    self._silent_until = time.monotonic() + _SILENT_SECONDS
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
