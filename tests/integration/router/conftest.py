"""Serve a router in front of real engines on a separate port."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
import pytest

from flashmoa.engine.local import LocalEngine
from flashmoa.router.application import application
from flashmoa.router.engines import RouterOptions
from flashmoa.router.shell.application import ShellOptions, shell_application
from tests.event_loop import own_task
from tests.integration.router.serving import serve


@asynccontextmanager
async def serve_router(options: RouterOptions | ShellOptions) -> AsyncGenerator[httpx.AsyncClient]:
    """Serve a router on a real socket; yield its client."""
    app = shell_application(options) if isinstance(options, ShellOptions) else application(options)
    async with serve(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        yield client


def make_options(*engines: LocalEngine, **more: object) -> RouterOptions:
    return RouterOptions([engine.url for engine in engines], watch_seconds=0.2, **more)  # type: ignore[arg-type]


@pytest.fixture
async def router(engine: LocalEngine, downstream: LocalEngine) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of a router in front of the session's two engines."""
    async with own_task(serve_router(make_options(engine, downstream))) as client:
        yield client


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of engines that publish KV events: SGLang compiles a hash function for them.

    It compiles in a new folder, because an engine that is killed while it compiles leaves a lock,
    and torch would wait for this lock without end.
    """
    return {"TORCH_EXTENSIONS_DIR": str(tmp_path_factory.mktemp("torch-extensions"))}
