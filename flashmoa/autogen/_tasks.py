"""Tasks that outlive the call that starts them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup

logger = logging.getLogger(__name__)

Work = Callable[[], Awaitable[None]]


class TaskHost:
    """A task group that outlives the calls that start tasks in it.

    AutoGen gives a client no scope of its own, so the group lives in a task of its own, from
    the first start until nothing runs in it or :meth:`close`.
    """

    def __init__(self) -> None:
        self._hosts: set[asyncio.Task[None]] = set()
        self._group: TaskGroup | None = None
        self._last: list[Work] = []
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    def start(self, work: Work) -> None:
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
        # Started twice before it runs, there are two; each ends by itself, or is closed.
        host = asyncio.create_task(self._run(work), name="flashmoa-links")
        self._hosts.add(host)
        host.add_done_callback(self._hosts.discard)

    def finish(self, work: Work) -> None:
        """As :meth:`start`, but where the host is being closed it is done before that ends."""
        if not self._closed:
            self.start(work)
        elif self._hosts:  # Else it has been closed, and nobody would do it any more.
            self._last.append(work)

    async def _run(self, first: Work) -> None:
        async with anyio.create_task_group() as group:
            self._group = group
            group.start_soon(_contained, first)
        if self._group is group:
            self._group = None

    async def close(self) -> None:
        """Cancel what runs and wait for it."""
        self._closed = True
        self._group = None
        hosts = list(self._hosts)
        for host in hosts:
            host.cancel()
        if hosts:
            await asyncio.wait(hosts)
        while self._last:
            await _contained(self._last.pop())


async def _contained(work: Work) -> None:
    try:
        await work()
    except asyncio.CancelledError:
        # Somebody cancelled what the work waited for, not the work: that concerns nobody else.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
    except Exception:
        logger.exception("A link failed; its agents run unlinked")
