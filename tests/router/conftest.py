"""A router in front of real engines, on a port of its own."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest
import uvicorn

from flashmoa.engine.local import LocalEngine
from flashmoa.router.application import application
from flashmoa.router.options import RouterOptions
from flashmoa.router.shell.application import ShellOptions
from flashmoa.router.shell.application import application as shell


@asynccontextmanager
async def routed(options: RouterOptions | ShellOptions) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of a router that is served on a real socket."""
    app = shell(options) if isinstance(options, ShellOptions) else application(options)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5, ws="none")
        server = uvicorn.Server(config)
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve, [listening])
            try:
                async with httpx.AsyncClient(
                    base_url=f"http://127.0.0.1:{port}", timeout=60
                ) as client:
                    with anyio.fail_after(30):
                        while not server.started:  # noqa: ASYNC110
                            await anyio.sleep(0.01)
                    yield client
            finally:
                server.should_exit = True


def options(*engines: LocalEngine, **more: object) -> RouterOptions:
    return RouterOptions([engine.url for engine in engines], watch_seconds=0.2, **more)  # type: ignore[arg-type]


@pytest.fixture
async def router(engine: LocalEngine, downstream: LocalEngine) -> AsyncGenerator[httpx.AsyncClient]:
    """Over the session's two engines."""
    async with routed(options(engine, downstream)) as client:
        yield client
