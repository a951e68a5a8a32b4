"""Test that engines' KV events fill a router's tables."""

import json
from pathlib import Path

import anyio
import httpx
import pytest

from flashmoa.engine.local import LocalEngines, free_port, wait_for_costs
from tests.integration.router.conftest import make_options, serve_router
from tests.integration.router.http_calls import (
    flush,
    generated,
    generation,
    metric,
    wait_for_metric,
)
from tests.integration.support import Words, start_special_engine

pytestmark = pytest.mark.nightly
BLOCKS = "flashmoa_router_engine_blocks{"


async def decode_beside_each_other(router: httpx.AsyncClient, document: str) -> None:
    """Check that a long answer is no load once its prompt is computed, although it is not streamed.

    The engine of the router counts as full with the document.
    """
    over: list[str] = []

    async def ask(name: str, tokens: int) -> None:
        await router.post("/generate", json=generation(f"{name} {document}", tokens, rid=name))
        over.append(name)

    async with anyio.create_task_group() as group:
        group.start_soon(ask, "long", 4000)
        await wait_for_metric(router, BLOCKS, above=19)
        await ask("short", 2)
        assert over == ["short"]
        group.cancel_scope.cancel()


async def test_kv_events_fill_and_empty_an_engines_table(
    engines: LocalEngines, model: Path, words: Words, compiling: dict[str, str]
) -> None:
    events = {"publisher": "zmq", "endpoint": f"tcp://*:{free_port()}"}
    document = words(320, 1030)
    arguments = ("--kv-events-config", json.dumps(events))
    async with start_special_engine(engines, model, *arguments, environment=compiling) as publisher:
        # The engine's own measurements at its start also fill its cache.
        assert (await wait_for_costs(publisher.url)).costs
        async with (
            serve_router(make_options(publisher, saturation_margin=0.001)) as router,
            httpx.AsyncClient(base_url=publisher.url, timeout=60) as direct,
        ):
            # The router learns of requests of other clients once it is connected.
            with anyio.fail_after(60):
                while not await metric(router, BLOCKS):
                    await flush(direct)
                    await generated(direct, document)
                    with anyio.move_on_after(1):
                        await wait_for_metric(router, BLOCKS)
                await flush(direct)
                # It also learns of a flush that it did not send itself.
                while await metric(router, BLOCKS):
                    await generated(direct, "hi", tokens=1)
                await generated(direct, document)
                await wait_for_metric(router, BLOCKS, above=19)
            answer = await generated(router, document, tokens=1)
            assert answer["meta_info"]["cached_tokens"] >= 300
            await flush(direct)
            await decode_beside_each_other(router, document)
