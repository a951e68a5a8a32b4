"""Provide clients of the two engines on which agents run."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine


@pytest.fixture
async def pair(
    engine: LocalEngine, downstream: LocalEngine
) -> AsyncGenerator[tuple[EngineClient, EngineClient]]:
    async with EngineClient(engine.url) as one, EngineClient(downstream.url) as other:
        yield one, other
