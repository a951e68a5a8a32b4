"""Run tasks that outlive the call that starts them (:class:`TaskHost`), frequently requested work
at most once at a time (:class:`SingleFlight`), several calls at once (:func:`all_of`), and
coroutines that never suspend (:func:`finish`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")

Work = Callable[[], Awaitable[None]]


class TaskHost:
    """Runs tasks that outlive the calls that start them, until :meth:`close`.

    Agent frameworks give a client no task group with the client's lifetime. So the host keeps a
    group in a separate task, which ends whenever nothing is left to run.

    Args:
        failure_message: the log message when work fails.
    """

    def __init__(self, failure_message: str) -> None:
        self._failure_message = failure_message
        self._group_tasks: set[asyncio.Task[None]] = set()
        self._group: TaskGroup | None = None
        self._cleanups: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self, work: Work) -> None:
        """Run ``work()`` in the background. Exceptions are logged, not raised.

        After :meth:`close` this does nothing.
        """
        if self._closed:
            return
        if self._group is not None:
            coroutine = self._log_failures(work)
            try:
                self._group.start_soon(lambda: coroutine)
                return
            except RuntimeError:  # The group's last task has just ended.
                coroutine.close()
                self._group = None
        # If this is called twice before the new task has run, there are two groups; both are in
        # `_group_tasks`, so both are closed.
        task = asyncio.create_task(self._run_group(work), name="flashmoa-background")
        self._group_tasks.add(task)
        task.add_done_callback(self._group_tasks.discard)

    def start_cleanup(self, work: Work) -> None:
        """Run ``work()``, which releases something, in the background.

        This is :meth:`start`, except while the host is closing: then the work still runs, but
        already cancelled (see :func:`run_cancelled`), and :meth:`close` waits for it. After
        :meth:`close` has returned, this does nothing.
        """
        if not self._closed:
            self.start(work)
        elif self._group_tasks:
            cleanup = asyncio.create_task(self._log_failures(lambda: run_cancelled(work)))
            self._cleanups.add(cleanup)
            cleanup.add_done_callback(self._cleanups.discard)

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended, even if the caller is cancelled.

        To release something, they may need what the caller closes next.
        """
        self._closed = True
        self._group = None
        # A closed loop, whose tasks were not cancelled by `asyncio.run`, never runs them again.
        group_tasks = [task for task in self._group_tasks if not task.get_loop().is_closed()]
        for task in group_tasks:
            task.cancel()
        # Releasing something takes at most 0.3 s.
        ends_at, cancellation = anyio.current_time() + 5.0, None
        while tasks := [task for task in (*group_tasks, *self._cleanups) if not task.done()]:
            if (left := ends_at - anyio.current_time()) <= 0:
                break
            try:
                with anyio.CancelScope(shield=True):
                    await asyncio.wait(tasks, timeout=left)
            except asyncio.CancelledError as error:
                cancellation = error  # Scopes of anyio do not shield from asyncio's own.
        if cancellation is not None:
            raise cancellation

    async def _run_group(self, first: Work) -> None:
        async with anyio.create_task_group() as group:
            self._group = group
            group.start_soon(self._log_failures, first)
        if self._group is group:
            self._group = None

    async def _log_failures(self, work: Work) -> None:
        try:
            await work()
        except asyncio.CancelledError:
            # If this task is not being cancelled, something else cancelled what the work awaited.
            # That must not cancel the other tasks of the group.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
        except Exception:
            logger.exception(self._failure_message)


class SingleFlight:
    """Runs ``work`` in the background, at most once at a time.

    Requests that arrive while it runs are combined into one more run.
    """

    def __init__(self, host: TaskHost, work: Work) -> None:
        self._host = host
        self._work = work
        self._is_requested = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_running(self) -> bool:
        # A loop that ends cancels tasks before their first step, so their `finally` does not run.
        return self._loop is not None and not self._loop.is_closed()

    def request(self) -> None:
        """Run the work; if it is running, run it once more afterwards."""
        self._is_requested = True
        if not self.is_running:
            self._loop = running_loop()
            self._host.start(self._run)

    def start_if_idle(self) -> None:
        """Run the work unless it is running."""
        if not self.is_running:
            self.request()

    def drop_pending(self) -> None:
        """Cancel requests for a further run; the current run continues."""
        self._is_requested = False

    async def _run(self) -> None:
        try:
            while self._is_requested:
                self._is_requested = False
                await self._work()
        finally:
            self._loop = None


async def run_cancelled(work: Work) -> None:
    """Run ``work`` as if its task were already cancelled.

    Every ``await`` in it is cancelled at once, except in code that shields itself for a moment, as
    the release of a prompt stream does (see :mod:`flashmoa.link.prompt_feed`).
    """
    with anyio.CancelScope() as scope:
        scope.cancel()
        await work()


async def all_of(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run the calls concurrently and return their results in order.

    If one fails, the others are cancelled.

    Raises: the first exception of a call itself, not an ``ExceptionGroup``.
    """
    results: dict[int, T] = {}
    failures: list[Exception] = []

    async def run(index: int, call: Callable[[], Awaitable[T]]) -> None:
        try:
            results[index] = await call()
        except Exception as error:
            failures.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for index, call in enumerate(calls):
            group.start_soon(run, index, call)
    if failures:
        raise failures[0]
    if len(results) < len(calls):
        raise RuntimeError("something that one of several calls awaited was cancelled elsewhere")
    return [results[index] for index in range(len(calls))]


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} has to wait for an event loop")


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return asyncio's event loop in this thread, if one runs."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Generator[None]:
    """Give a context variable that has a value another one inside this context."""
    before = variable.get()
    variable.set(value)
    try:
        yield
    finally:
        # Not a token: a discarded coroutine is closed in another context, where it is invalid.
        variable.set(before)
