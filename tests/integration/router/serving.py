"""Serve applications on real sockets in the process of the tests."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import uvicorn
from starlette.applications import Starlette


@asynccontextmanager
async def serve(app: Starlette) -> AsyncGenerator[str]:
    """Serve an application; yield its URL."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5, ws="none")
        server = uvicorn.Server(config)
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve, [listening])
            try:
                with anyio.fail_after(30):
                    while not server.started:  # noqa: ASYNC110
                        await anyio.sleep(0.01)
                yield f"http://127.0.0.1:{listening.getsockname()[1]}"
            finally:
                server.should_exit = True
