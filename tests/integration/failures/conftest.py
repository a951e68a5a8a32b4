"""Provide the two engines' baselines, a proxy before the first engine, and clients."""

from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from autogen_core.models import ModelFamily, ModelInfo

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.engine.local import LocalEngine
from tests.event_loop import own_task
from tests.integration.baseline import Baseline
from tests.integration.failures.matrix import Make
from tests.integration.faulty_proxy import FaultyProxy, start_faulty_proxy


@pytest.fixture
async def upstream_proxy(engine: LocalEngine) -> AsyncGenerator[FaultyProxy]:
    async with own_task(start_faulty_proxy(engine.url)) as proxy:
        yield proxy


@pytest.fixture
async def baselines(
    engine: LocalEngine, downstream: LocalEngine
) -> AsyncGenerator[tuple[Baseline, Baseline]]:
    """The baselines of the upstream's and of the downstream's engine."""
    async with (
        httpx.AsyncClient(base_url=engine.url, timeout=60) as one,
        httpx.AsyncClient(base_url=downstream.url, timeout=60) as other,
    ):
        pair = Baseline(engine, one), Baseline(downstream, other)
        for baseline in pair:
            await baseline.http.post("/flush_cache?timeout=30")
            await baseline.take()
        yield pair


MODEL = ModelInfo(
    vision=False,
    function_calling=False,
    json_output=False,
    family=ModelFamily.UNKNOWN,
    structured_output=False,
)


@pytest.fixture
def make() -> Make:
    def client(url: str, tokens: int = 12, **more: Any) -> FlashMoAChatCompletionClient:
        return FlashMoAChatCompletionClient(
            model="tiny",
            base_url=url,
            temperature=0,
            max_tokens=tokens,
            extra_body={"ignore_eos": True},
            # Given: asking the engine would block this event loop, and the proxy runs in this loop.
            model_info=MODEL,
            **{"max_retries": 0, **more},
        )

    return client
