"""Tasks that outlive the call that starts them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup

logger = logging.getLogger(__name__)


class TaskHost:
    """A task group that outlives the calls that start tasks in it.

    AutoGen gives a client no scope of its own, so the group lives in a task of its own, from
    the first start until nothing runs in it or :meth:`close`.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._group: TaskGroup | None = None
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work()`` in the group; what it raises is logged and goes no further.

        Once closed, nothing is started any more.
        """
        if self._closed:
            return
        if self._group is not None:
            try:
                self._group.start_soon(_contained, work)
                return
            except RuntimeError:  # Its last task ended just now.
                self._group = None
        self._task = asyncio.create_task(self._run(work), name="flashmoa-links")

    async def _run(self, first: Callable[[], Awaitable[None]]) -> None:
        async with anyio.create_task_group() as group:
            self._group = group
            group.start_soon(_contained, first)
        if self._group is group:
            self._group = None

    async def close(self) -> None:
        """Cancel what runs and wait for it."""
        self._closed = True
        task, self._task, self._group = self._task, None, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])


async def _contained(work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except Exception:
        logger.exception("A link failed; its agents run unlinked")
