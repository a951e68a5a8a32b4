"""Provide clients of two engines, which must be idle afterwards."""

from collections.abc import AsyncGenerator

import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from tests.integration.openai.programs import (
    Clients,
    open_clients,
)
from tests.integration.support import wait_until_idle


@pytest.fixture
async def clients(
    engine: LocalEngine,
    downstream: LocalEngine,
    client: EngineClient,
    downstream_client: EngineClient,
) -> AsyncGenerator[Clients]:
    for each in (client, downstream_client):
        await each.flush_cache()
    async with open_clients(engine.url, downstream.url) as opened:
        yield opened
    for each in (client, downstream_client):
        await wait_until_idle(each)
