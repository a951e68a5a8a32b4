"""Stop the work for an HTTP client that has disconnected; apart, since Starlette is an extra."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from starlette.requests import Request


@asynccontextmanager
async def while_connected(request: Request) -> AsyncGenerator[None]:
    """Cancel what is done within the context once the client disconnects.

    The code after the context runs all the same; its answer reaches no client. The request's body
    must have been read before.
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
                problem = error  # Raised below by itself, not as a group.
            group.cancel_scope.cancel()
    if problem is not None:
        raise problem
