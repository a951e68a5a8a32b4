"""Tasks that run as long as there is work, and go on after a bug of the plugin raised."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

_PAUSE_AFTER_ERROR = 1.0


class SupervisedTasks:
    """Tasks that run while they are ``needed``, and begin again after an exception.

    ``failed`` is called with what a task raised, before the task begins again.
    """

    def __init__(self, needed: Callable[[], bool], failed: Callable[[Exception], None]) -> None:
        self._needed = needed
        self._failed = failed
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reported: set[str] = set()

    def ensure(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Start ``work``, which returns when it is not needed, in a task unless it runs."""
        task = self._tasks.get(name)
        if task is None or task.done():
            self._tasks[name] = asyncio.create_task(self._supervise(name, work), name=name)

    async def _supervise(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        while self._needed():
            try:
                await work()
            except Exception as raised:
                error = raised.exceptions[0] if isinstance(raised, ExceptionGroup) else raised
                self._report(name, error)
                self._failed(error)
                await asyncio.sleep(_PAUSE_AFTER_ERROR)

    def _report(self, name: str, error: Exception) -> None:
        if type(error).__name__ not in self._reported:
            self._reported.add(type(error).__name__)
            logger.error("%s: streams stop prefilling, requests go on", name, exc_info=error)
