"""Provide clients of the agents' two engines, and of a server of mixtures."""

from collections.abc import AsyncGenerator

import pytest
from openai import AsyncOpenAI

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from tests.event_loop import own_task
from tests.integration.faulty_proxy import FaultyProxy, start_faulty_proxy
from tests.integration.moa.serving import connected, served


@pytest.fixture
async def pair(
    engine: LocalEngine, downstream: LocalEngine
) -> AsyncGenerator[tuple[EngineClient, EngineClient]]:
    async with EngineClient(engine.url) as one, EngineClient(downstream.url) as other:
        yield one, other


@pytest.fixture
async def proxy(engine: LocalEngine) -> AsyncGenerator[FaultyProxy]:
    async with own_task(start_faulty_proxy(engine.url)) as started:
        yield started


@pytest.fixture
async def proxied(proxy: FaultyProxy) -> AsyncGenerator[EngineClient]:
    async with EngineClient(proxy.url) as client:
        yield client


@pytest.fixture(scope="module")
async def moa_url(
    engine: LocalEngine, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[str]:
    async with own_task(served(engine, tmp_path_factory.mktemp("served"))) as running:
        yield running


@pytest.fixture
async def openai_client(moa_url: str) -> AsyncGenerator[AsyncOpenAI]:
    async with connected(moa_url) as openai:
        yield openai
