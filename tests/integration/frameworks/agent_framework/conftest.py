"""Start a client of Agent Framework on each of two engines."""

from collections.abc import AsyncGenerator

import pytest

from flashmoa.agent_framework import FlashMoAChatClient
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from tests.integration.frameworks.agent_framework.workflows import Pair
from tests.integration.support import wait_until_idle


@pytest.fixture
async def clients(
    engine: LocalEngine,
    downstream: LocalEngine,
    client: EngineClient,
    downstream_client: EngineClient,
) -> AsyncGenerator[Pair]:
    async with (
        FlashMoAChatClient("tiny", base_url=engine.url) as first,
        FlashMoAChatClient("tiny", base_url=f"{downstream.url}/v1") as second,
    ):
        for started in (client, downstream_client):
            await started.flush_cache()
        yield first, second
    await wait_until_idle(client)
    await wait_until_idle(downstream_client)
