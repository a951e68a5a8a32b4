"""Connect a client of the tests' engine."""

from collections.abc import AsyncGenerator

import pytest

from flashmoa.engine.local import LocalEngine
from tests.integration.frameworks.autogen.runs import Client, connected


@pytest.fixture
async def model_client(engine: LocalEngine) -> AsyncGenerator[Client]:
    async with connected(engine) as (client,):
        yield client
