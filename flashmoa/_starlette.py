"""Giving up what is done for an HTTP client that has gone away."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from starlette.requests import Request


@asynccontextmanager
async def while_connected(request: Request) -> AsyncGenerator[None]:
    """Cancels what is done for a client that goes away; what comes after the context is for nobody.

    The request's body must have been read.
    """

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    problem: Exception | None = None
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            try:
                yield
            except Exception as error:
                problem = error  # Not as a group.
            group.cancel_scope.cancel()
    if problem is not None:
        raise problem
