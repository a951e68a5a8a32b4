"""Requests that wait for an engine, and the policy that gives them one."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Collection, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import anyio

from flashmoa.router.blocks import Blocks
from flashmoa.router.errors import NoEngine, QueueFull
from flashmoa.router.policies import EngineTraits, Policy, WaitingRequest


@dataclass(slots=True)
class Placement:
    """A request's engine, from when the request is given one until it is over."""

    request: str
    engine: str
    _dispatcher: Dispatcher

    def computed(self) -> None:
        """Report that its prompt is computed; harmless to repeat."""
        self._dispatcher.computed(self.request)


@dataclass(slots=True)
class _QueueEntry:
    waiting: WaitingRequest
    decided: anyio.Event = field(default_factory=anyio.Event)
    engine: str | None = None


class Dispatcher:
    """The queue in front of the engines.

    Args:
        policy: is asked whenever something has changed.
        max_waiting: how many requests may wait at a time.
    """

    def __init__(self, policy: Policy, max_waiting: int = 10_000) -> None:
        self._policy = policy
        self._max_waiting = max_waiting
        self._engines: set[str] = set()
        self._queue: dict[str, _QueueEntry] = {}
        self._names = itertools.count()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def engines(self) -> Collection[str]:
        return self._engines

    def join(self, engine: str, traits: EngineTraits) -> None:
        self._policy.join(engine, traits)
        self._engines.add(engine)
        self._route()

    def leave(self, engine: str) -> None:
        self._policy.leave(engine)
        self._engines.discard(engine)
        self._route()

    def stored(self, engine: str, hashes: Collection[int]) -> None:
        self._policy.stored(engine, hashes)
        self._route()

    def removed(self, engine: str, hashes: Collection[int]) -> None:
        self._policy.removed(engine, hashes)

    def cleared(self, engine: str) -> None:
        self._policy.cleared(engine)

    def computed(self, request: str) -> None:
        self._policy.computed(request)
        self._route()

    @asynccontextmanager
    async def place(self, blocks: Blocks) -> AsyncGenerator[Placement]:
        """Wait for an engine, and keep the place on it until the context is left.

        Raises: NoEngine; QueueFull.
        """
        request = str(next(self._names))
        try:
            yield Placement(request, await self._wait(request, blocks), self)
        finally:
            self._queue.pop(request, None)
            self._end(request)

    @contextmanager
    def place_at(self, engine: str, blocks: Blocks) -> Generator[Placement]:
        """Place a request on the engine that has its prompt already, without waiting."""
        request = str(next(self._names))
        if engine in self._engines:
            self._policy.admit(WaitingRequest(request, blocks), engine, cached=blocks.length)
        try:
            yield Placement(request, engine, self)
        finally:
            self._end(request)

    async def _wait(self, request: str, blocks: Blocks) -> str:
        if len(self._queue) >= self._max_waiting:
            raise QueueFull(len(self._queue))
        entry = self._queue[request] = _QueueEntry(WaitingRequest(request, blocks))
        self._route()
        await entry.decided.wait()
        if entry.engine is None:
            raise NoEngine
        return entry.engine

    def _end(self, request: str) -> None:
        self._policy.end(request)
        self._route()

    def _route(self) -> None:
        """Wake the requests whose engine is decided, or all of them if no engine is left."""
        if not self._queue:
            return
        placed = self._policy.route([entry.waiting for entry in self._queue.values()])
        for request, engine in placed.items():
            self._wake(request, engine)
        for request in () if self._engines else tuple(self._queue):
            self._wake(request, None)

    def _wake(self, request: str, engine: str | None) -> None:
        entry = self._queue.pop(request)
        entry.engine = engine
        entry.decided.set()
