"""Queue requests until the policy gives them an engine (`Dispatcher`)."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from flashmoa.router.cache_tables import Blocks, EngineTraits
from flashmoa.router.forwarding import AnswerObserver, RouterError
from flashmoa.router.policy import PrefixAware, WaitingRequest


class NoEngine(RouterError):
    """Raised when no engine is left that could take the request."""

    status = 503

    def __init__(self) -> None:
        again = "(the router asks the engines again every few seconds)"
        super().__init__(f"no engine answers; send the request again later {again}")


class Placement(AnswerObserver):
    """Assigns a request to an engine, and learns from its answer that its prompt is computed.

    The first piece of an answer shows that a prompt is computed; of a list of prompts, its end.
    """

    def __init__(self, request: str, engine: str, blocks: Blocks, dispatcher: Dispatcher) -> None:
        self.engine = engine
        self._request = request
        self._blocks = blocks
        self._dispatcher = dispatcher

    def receive(self, content: bytes) -> None:
        if not self._blocks.is_list:
            self.finish_prefill()

    def end(self, ending: str) -> None:
        if ending == "answered":
            self.finish_prefill()

    def finish_prefill(self) -> None:
        # Only the first piece of an answer is news; a round of routing would be lost on the others.
        if self._dispatcher.policy.finish_prefill(self._request):
            self._dispatcher.reconsider()


@dataclass(slots=True)
class _QueueEntry:
    waiting: WaitingRequest
    decided: anyio.Event = field(default_factory=anyio.Event)
    engine: str | None = None


class Dispatcher:
    """Queues requests, and asks the policy for their engines whenever something has changed.

    Attributes:
        policy: call :meth:`reconsider` after telling it of a change.
    """

    def __init__(self, policy: PrefixAware) -> None:
        self.policy = policy
        self._queue: dict[str, _QueueEntry] = {}
        self._names = itertools.count()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def join(self, engine: str, traits: EngineTraits) -> None:
        self.policy.join(engine, traits)
        self.reconsider()

    def leave(self, engine: str) -> None:
        """Remove an engine. If no engine is left, every request in the queue fails."""
        self.policy.leave(engine)
        self.reconsider()

    @asynccontextmanager
    async def place(self, blocks: Blocks) -> AsyncGenerator[Placement]:
        """Wait for an engine for a prompt. The request ends when the context is left.

        Raises: NoEngine if no engine is left.
        """
        request = str(next(self._names))
        entry = self._queue[request] = _QueueEntry(WaitingRequest(request, blocks))
        try:
            self.reconsider()
            await entry.decided.wait()
            if entry.engine is None:
                raise NoEngine
            yield Placement(request, entry.engine, blocks, self)
        finally:
            self._queue.pop(request, None)
            self.policy.end(request)
            self.reconsider()

    def reconsider(self) -> None:
        """Wake the requests whose engine is decided, or all of them if no engine is left."""
        decided: dict[str, str | None] = {}
        if not self.policy.engines:
            decided.update(dict.fromkeys(self._queue))
        elif self._queue and self.policy.takes_requests():
            decided.update(self.policy.route([one.waiting for one in self._queue.values()]))
        for request, engine in decided.items():
            entry = self._queue.pop(request)
            entry.engine = engine
            entry.decided.set()
