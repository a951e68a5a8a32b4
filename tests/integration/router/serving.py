"""Serve applications on real sockets in the process of the tests, and send requests in turn."""

import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import anyio
import uvicorn
from starlette.types import ASGIApp

from flashmoa.cli.ports import bind
from flashmoa.router.policy import PrefixAware, WaitingRequest
from tests.waiting import until


@asynccontextmanager
async def serve(app: ASGIApp) -> AsyncGenerator[str]:
    """Serve an application at a free port; yield its URL."""
    with bind("127.0.0.1", 0) as listening:
        config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5, ws="none")
        server = uvicorn.Server(config)
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve, [listening])
            try:
                await until(lambda: server.started)
                yield f"http://127.0.0.1:{listening.getsockname()[1]}"
            finally:
                server.should_exit = True


class InTurn(PrefixAware):
    """Sends requests to engines in turn, so that a test knows which engine gets which."""

    def __init__(self) -> None:
        super().__init__()
        self._number = itertools.count()

    def takes_requests(self) -> bool:
        return True

    def route(self, queue: Sequence[WaitingRequest]) -> dict[str, str]:
        # Engines join in any order.
        names = sorted(self.engines)
        placed = {one.request: names[next(self._number) % len(names)] for one in queue}
        for one in queue:
            self.admit(one, placed[one.request])
        return placed
