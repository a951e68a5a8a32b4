"""Queue requests until the policy gives them an engine (`Dispatcher`)."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import anyio

from flashmoa.router.cache_tables import Blocks, EngineTraits
from flashmoa.router.errors import NoEngine, QueueFull
from flashmoa.router.policy import PrefixAware, WaitingRequest

# The most requests in the queue, by default.
MAX_WAITING = 10_000


@dataclass(frozen=True, slots=True)
class Placement:
    """Assigns a request to an engine, until the request ends."""

    request: str
    engine: str
    is_list: bool
    _dispatcher: Dispatcher

    def finish_prefill(self) -> None:
        """Report that the request's prompt is computed; harmless to repeat."""
        # Only the first piece of an answer is news; a round of routing would be lost on the others.
        if self._dispatcher.policy.finish_prefill(self.request):
            self._dispatcher.reconsider()


@dataclass(slots=True)
class _QueueEntry:
    waiting: WaitingRequest
    decided: anyio.Event = field(default_factory=anyio.Event)
    engine: str | None = None


class Dispatcher:
    """Queues requests, and asks the policy for their engines whenever something has changed.

    Args:
        max_waiting: the most requests in the queue.

    Attributes:
        policy: call :meth:`reconsider` after telling it of a change.
        engines: the engines that have joined.
    """

    def __init__(self, policy: PrefixAware, max_waiting: int = MAX_WAITING) -> None:
        self.policy = policy
        self.engines: set[str] = set()
        self._max_waiting = max_waiting
        self._queue: dict[str, _QueueEntry] = {}
        self._names = itertools.count()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def join(self, engine: str, traits: EngineTraits) -> None:
        self.policy.join(engine, traits)
        self.engines.add(engine)
        self.reconsider()

    def leave(self, engine: str) -> None:
        """Remove an engine. If no engine is left, every request in the queue fails."""
        self.policy.leave(engine)
        self.engines.discard(engine)
        self.reconsider()

    @asynccontextmanager
    async def place(self, blocks: Blocks) -> AsyncGenerator[Placement]:
        """Wait for an engine for a prompt. The request ends when the context is left.

        Raises:
            NoEngine: if no engine is left.
            QueueFull: if it would have to wait, and ``max_waiting`` others do.
        """
        request = str(next(self._names))
        try:
            engine = await self._wait(request, blocks)
            yield Placement(request, engine, blocks.is_list, self)
        finally:
            self._queue.pop(request, None)
            self.policy.end(request)
            self.reconsider()

    @contextmanager
    def place_at(self, engine: str, blocks: Blocks) -> Generator[Placement]:
        """Place a request without waiting on the engine that has computed its prompt already.

        The request ends when the context is left.
        """
        request = str(next(self._names))
        if engine in self.engines:
            self.policy.admit(WaitingRequest(request, blocks), engine, cached=blocks.length)
        try:
            yield Placement(request, engine, blocks.is_list, self)
        finally:
            self.policy.end(request)
            self.reconsider()

    async def _wait(self, request: str, blocks: Blocks) -> str:
        entry = self._queue[request] = _QueueEntry(WaitingRequest(request, blocks))
        # Even if all engines are full, one may take this request, but none of the others.
        self.reconsider(None if self.policy.takes_requests() else entry)
        if request in self._queue and len(self._queue) > self._max_waiting:
            raise QueueFull(
                f"{self._max_waiting} requests wait for an engine already, the most that the "
                "router allows; try again later"
            )
        await entry.decided.wait()
        if entry.engine is None:
            raise NoEngine
        return entry.engine

    def reconsider(self, only: _QueueEntry | None = None) -> None:
        """Wake the requests whose engine is decided, or all of them if no engine is left.

        Args: only: the only request for which an engine may be found.
        """
        if not self._queue or (self.engines and not only and not self.policy.takes_requests()):
            return
        decided: Mapping[str, str | None] = dict.fromkeys(self._queue)
        if self.engines:
            entries = self._queue.values() if only is None else [only]
            decided = self.policy.route([entry.waiting for entry in entries])
        for request, engine in decided.items():
            entry = self._queue.pop(request)
            entry.engine = engine
            entry.decided.set()
