"""Fixtures of the plugin's integration tests: clients of the module's engine, or the session's."""

from collections.abc import AsyncGenerator

import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from tests.integration.baseline import Baseline
from tests.integration.support import wait_until_idle


@pytest.fixture
async def client(engine: LocalEngine) -> AsyncGenerator[EngineClient]:
    """Each test leaves nothing running, and no KV that is not free or evictable."""
    async with EngineClient(engine.url, timeout=60) as connected:
        yield connected
        await wait_until_idle(connected)


@pytest.fixture
async def http(engine: LocalEngine) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as connected:
        yield connected


@pytest.fixture(scope="module")
async def base(engine: LocalEngine) -> AsyncGenerator[Baseline]:
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as http:
        baseline = Baseline(engine, http)
        await baseline.take()
        yield baseline
