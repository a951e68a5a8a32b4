"""Queue requests until the policy gives them an engine (`Dispatcher`)."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio

from flashmoa.router.cache_tables import Blocks
from flashmoa.router.forwarding import AnswerObserver, RouterError
from flashmoa.router.policy import PrefixAware, WaitingRequest


class NoEngine(RouterError):
    """Raised when no engine is left that could take the request."""

    status = 503

    def __init__(self) -> None:
        super().__init__("no engine answers; send the request again in a few seconds")


class Placement(AnswerObserver):
    """A request's ``engine``: empty until it is decided, and if no engine is left.

    The first piece of the answer shows that the prompt is computed.
    """

    def __init__(self, waiting: WaitingRequest, dispatcher: Dispatcher) -> None:
        self.waiting = waiting
        self.engine = ""
        self.decided = anyio.Event()
        self._dispatcher = dispatcher

    def receive(self, content: bytes) -> None:
        # Only the first piece is news. Later ones must not cause a round of routing.
        if self._dispatcher.policy.finish_prefill(self.waiting.request):
            self._dispatcher.reconsider()


class Dispatcher:
    """Queues requests; call :meth:`reconsider` after telling the policy of a change."""

    def __init__(self, policy: PrefixAware) -> None:
        self.policy = policy
        self._queue: dict[str, Placement] = {}
        self._names = itertools.count()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @asynccontextmanager
    async def place(self, blocks: Blocks) -> AsyncGenerator[Placement]:
        """Wait for an engine for a prompt. Leaving the context ends the request.

        Raises: NoEngine if no engine is left.
        """
        request = str(next(self._names))
        placement = self._queue[request] = Placement(WaitingRequest(request, blocks), self)
        try:
            self.reconsider()
            await placement.decided.wait()
            if not placement.engine:
                raise NoEngine
            yield placement
        finally:
            self._queue.pop(request, None)
            self.policy.end(request)
            self.reconsider()

    def reconsider(self) -> None:
        """Wake the requests that have an engine now. If no engine is left, wake all."""
        decided: dict[str, str] = {}
        if not self.policy.engines:
            decided = dict.fromkeys(self._queue, "")
        elif self._queue and self.policy.takes_requests():
            decided = self.policy.route([one.waiting for one in self._queue.values()])
        for request, engine in decided.items():
            placement = self._queue.pop(request)
            placement.engine = engine
            placement.decided.set()
