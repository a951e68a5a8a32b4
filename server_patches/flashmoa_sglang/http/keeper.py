"""Tasks that last as long as there is work, and go on after a mistake of ours."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

_PAUSE_AFTER_MISTAKE = 1.0


class Keeper:
    """Keeps tasks running while they are ``needed``.

    ``mistaken``: told of what a task raised, before the task is begun again.
    """

    def __init__(self, needed: Callable[[], bool], mistaken: Callable[[Exception], None]) -> None:
        self._needed = needed
        self._mistaken = mistaken
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reported: set[str] = set()

    def keep(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Have ``work``, which returns when it is not needed, done in a task of its own."""
        task = self._tasks.get(name)
        if task is None or task.done():
            self._tasks[name] = asyncio.create_task(self._go_on(name, work), name=name)

    async def _go_on(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        while self._needed():
            try:
                await work()
            except Exception as mistake:
                error = mistake.exceptions[0] if isinstance(mistake, ExceptionGroup) else mistake
                self._report(name, error)
                self._mistaken(error)
                await asyncio.sleep(_PAUSE_AFTER_MISTAKE)

    def _report(self, name: str, error: Exception) -> None:
        if type(error).__name__ not in self._reported:
            self._reported.add(type(error).__name__)
            logger.error("%s: streams stop prefilling, requests go on", name, exc_info=error)
