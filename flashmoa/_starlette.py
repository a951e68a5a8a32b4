"""Read requests' bodies, and stop the work for an HTTP client that has disconnected.

A separate module, since Starlette is an optional dependency.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import Request


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return a request's body. Raises: HTTPException if it is larger than ``max_bytes``."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            problem = f"the body is larger than {max_bytes} bytes; send a smaller request"
            raise HTTPException(413, problem)
    return bytes(body)


@asynccontextmanager
async def while_connected(request: Request) -> AsyncGenerator[None]:
    """Cancel the block of this context once the client disconnects.

    The code after the block still runs, but its answer reaches no client. Read the request's body
    before entering the block.
    """

    async def cancel_on_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    failure: Exception | None = None
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(cancel_on_disconnect)
            try:
                yield
            except Exception as error:
                failure = error  # Raised below; the task group would wrap it in an ExceptionGroup.
            group.cancel_scope.cancel()
    if failure is not None:
        raise failure
