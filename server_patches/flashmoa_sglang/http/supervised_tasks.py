"""``SupervisedTasks``: background tasks that are restarted after an exception."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

_PAUSE_AFTER_ERROR = 1.0


class SupervisedTasks:
    """Runs tasks while they are needed, and restarts a task that has raised an exception.

    Args:
        is_needed: whether tasks are needed at the moment.
        on_error: called with the exception, before the task is restarted.
    """

    def __init__(
        self, is_needed: Callable[[], bool], on_error: Callable[[Exception], None]
    ) -> None:
        self._is_needed = is_needed
        self._on_error = on_error
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reported: set[str] = set()

    def ensure(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Start ``work`` in a task, unless it is running; it must return when it is not needed."""
        task = self._tasks.get(name)
        if task is None or task.done():
            self._tasks[name] = asyncio.create_task(self._supervise(name, work), name=name)

    async def _supervise(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        while self._is_needed():
            try:
                await work()
            except Exception as raised:
                error = raised.exceptions[0] if isinstance(raised, ExceptionGroup) else raised
                self._report(name, error)
                self._on_error(error)
                await asyncio.sleep(_PAUSE_AFTER_ERROR)

    def _report(self, name: str, error: Exception) -> None:
        if type(error).__name__ not in self._reported:
            self._reported.add(type(error).__name__)
            text = "The task %r failed: open streams stop prefilling, and requests are not affected"
            logger.error(text, name, exc_info=error)
