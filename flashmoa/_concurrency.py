"""Tasks that outlive the call that starts them, and several that end together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")

Work = Callable[[], Awaitable[None]]


class TaskHost:
    """A task group that outlives the calls that start tasks in it.

    Agent frameworks give a client no scope of its own, so the group lives in a task of its own,
    from the first start until nothing runs in it or :meth:`close`.
    """

    def __init__(self) -> None:
        self._hosts: set[asyncio.Task[None]] = set()
        self._group: TaskGroup | None = None
        self._last: set[asyncio.Task[None]] = set()
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
        """Run ``work()`` as :meth:`start`; a host that is being closed waits for it."""
        if not self._closed:
            self.start(work)
        elif self._hosts:  # Else it has been closed, and nothing would run it any more.
            last = asyncio.create_task(_contained(lambda: in_haste(work)))
            self._last.add(last)
            last.add_done_callback(self._last.discard)

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
            await asyncio.wait(set(self._last))


class Repeated:
    """Work that runs in one task at a time, and once more for all calls that come meanwhile."""

    def __init__(self, host: TaskHost, work: Work) -> None:
        self._host = host
        self._work = work
        self._wanted = False
        self.is_running = False

    def want(self) -> None:
        """Run it; if it runs already, run it once more after that."""
        self._wanted = True
        if not self.is_running:
            self.is_running = True
            self._host.start(self._run)

    def ensure(self) -> None:
        """Run it unless it runs already."""
        if not self.is_running:
            self.want()

    def withdraw(self) -> None:
        """Take back what :meth:`want` asked for beyond the current run."""
        self._wanted = False

    async def _run(self) -> None:
        try:
            while self._wanted:
                self._wanted = False
                await self._work()
        finally:
            self.is_running = False


async def _contained(work: Work) -> None:
    try:
        await work()
    except asyncio.CancelledError:
        # What the work waited for was cancelled, not the work itself: that goes no further.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
    except Exception:
        logger.exception("A link failed; its agents run unlinked")


async def in_haste(work: Work) -> None:
    """Do what a cancelled task has time for: release what it holds, if that is quick."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        await work()


async def all_of(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Return the results of calls, in order; if one fails, cancel the others and raise it."""
    results: dict[int, T] = {}
    problems: list[Exception] = []

    async def run(index: int, call: Callable[[], Awaitable[T]]) -> None:
        try:
            results[index] = await call()
        except Exception as error:
            problems.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for index, call in enumerate(calls):
            group.start_soon(run, index, call)
    if problems:
        raise problems[0]
    return [results[index] for index in range(len(calls))]
