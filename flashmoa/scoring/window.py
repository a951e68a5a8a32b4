"""Working on many items at once, in bounded memory, and giving the results in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import anyio

from flashmoa._concurrency import all_of

T = TypeVar("T")
R = TypeVar("R")


class Window(Generic[T, R]):
    """Items on their way.

    Args:
        batches: the items, some at a time. Only one batch is held, and asked for when it is due.
        work: is done on each item, on ``workers`` of them at once.
        write: is given results as soon as they are the next ones.
        ahead: how many items may be taken whose results are not written yet; one that takes
            long holds up those behind it no sooner.
    """

    def __init__(
        self,
        batches: AsyncIterator[Sequence[T]],
        work: Callable[[T], Awaitable[R]],
        write: Callable[[Sequence[R]], None],
        *,
        workers: int,
        ahead: int,
    ) -> None:
        self._batches = batches
        self._work = work
        self._write = write
        self._workers = workers
        self._ahead = ahead
        self._items: deque[T] = deque()
        self._taken = self._written = 0
        self._results: dict[int, R] = {}
        self._moved: anyio.Event | None = None
        self._reading = anyio.Lock()
        self._is_over = False

    async def run(self) -> None:
        """Until every item's result is written. Raises: what reading or work raises, at once."""
        await all_of([self._worker] * self._workers)

    async def _worker(self) -> None:
        while await self._has_next():
            index, item = self._taken, self._items.popleft()
            self._taken += 1
            self._results[index] = await self._work(item)
            self._pass_on()

    async def _has_next(self) -> bool:
        while True:
            if self._taken - self._written >= self._ahead:
                # Made only where somebody waits: it is the dearest part of all this.
                self._moved = self._moved or anyio.Event()
                await self._moved.wait()
            elif self._items:
                return True
            elif self._is_over:
                return False
            else:
                await self._read()

    async def _read(self) -> None:
        async with self._reading:
            if self._items or self._is_over:
                return  # Another worker has read meanwhile.
            batch = await anext(self._batches, None)
            self._is_over = batch is None
            self._items.extend(batch or ())

    def _pass_on(self) -> None:
        ready: list[R] = []
        while self._written in self._results:
            ready.append(self._results.pop(self._written))
            self._written += 1
        if ready:
            self._write(ready)
        if ready and self._moved is not None:
            self._moved.set()
            self._moved = None
