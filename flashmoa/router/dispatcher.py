"""Requests that wait for an engine, and the policy that gives them one."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Collection, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import anyio

from flashmoa.errors import FlashMoAError
from flashmoa.router.blocks import Blocks
from flashmoa.router.policies import EngineTraits, Policy, Waiting


class NoEngine(FlashMoAError):
    """Raised when no engine is left that could take the request."""


class QueueFull(FlashMoAError):
    """Raised when more requests wait than the queue admits."""


@dataclass(slots=True)
class Place:
    """A request's engine, from when it is given one until the request is over."""

    request: str
    engine: str
    _dispatcher: Dispatcher

    def computed(self) -> None:
        """Its prompt is; harmless to repeat."""
        self._dispatcher.computed(self.request)


@dataclass(slots=True)
class _Seat:
    waiting: Waiting
    called: anyio.Event = field(default_factory=anyio.Event)
    engine: str | None = None


class Dispatcher:
    """The queue in front of the engines.

    Args:
        policy: asked whenever something has changed.
        most_waiting: requests that may wait at a time.
    """

    def __init__(self, policy: Policy, most_waiting: int = 10_000) -> None:
        self._policy = policy
        self._most_waiting = most_waiting
        self._engines: set[str] = set()
        self._seats: dict[str, _Seat] = {}
        self._names = itertools.count()

    @property
    def waiting(self) -> int:
        return len(self._seats)

    @property
    def engines(self) -> Collection[str]:
        return self._engines

    def join(self, engine: str, traits: EngineTraits) -> None:
        self._policy.join(engine, traits)
        self._engines.add(engine)
        self._round()

    def leave(self, engine: str) -> None:
        self._policy.leave(engine)
        self._engines.discard(engine)
        self._round()

    def stored(self, engine: str, hashes: Collection[int]) -> None:
        self._policy.stored(engine, hashes)
        self._round()

    def removed(self, engine: str, hashes: Collection[int]) -> None:
        self._policy.removed(engine, hashes)

    def cleared(self, engine: str) -> None:
        self._policy.cleared(engine)

    def computed(self, request: str) -> None:
        self._policy.computed(request)
        self._round()

    @asynccontextmanager
    async def place(self, blocks: Blocks) -> AsyncGenerator[Place]:
        """Waits for an engine and keeps the place on it until the context is left.

        Raises: NoEngine; QueueFull.
        """
        request = str(next(self._names))
        try:
            yield Place(request, await self._wait(request, blocks), self)
        finally:
            self._seats.pop(request, None)
            self._end(request)

    @contextmanager
    def place_at(self, engine: str, blocks: Blocks) -> Generator[Place]:
        """That of a request whose engine has its prompt already; it does not wait."""
        request = str(next(self._names))
        if engine in self._engines:
            self._policy.admit(Waiting(request, blocks), engine, cached=blocks.length)
        try:
            yield Place(request, engine, self)
        finally:
            self._end(request)

    async def _wait(self, request: str, blocks: Blocks) -> str:
        if len(self._seats) >= self._most_waiting:
            raise QueueFull
        seat = self._seats[request] = _Seat(Waiting(request, blocks))
        self._round()
        await seat.called.wait()
        if seat.engine is None:
            raise NoEngine
        return seat.engine

    def _end(self, request: str) -> None:
        self._policy.end(request)
        self._round()

    def _round(self) -> None:
        """Call those whose engine is known, or all if there is no engine left."""
        if not self._seats:
            return
        placed = self._policy.route([seat.waiting for seat in self._seats.values()])
        for request, engine in placed.items():
            self._call(request, engine)
        for request in () if self._engines else tuple(self._seats):
            self._call(request, None)

    def _call(self, request: str, engine: str | None) -> None:
        seat = self._seats.pop(request)
        seat.engine = engine
        seat.called.set()
