"""New weights, unloaded adapters, aborts and pauses while prompt streams are open.

These operations do not wait for the end of a stream. New weights close all streams. Unloading an
adapter closes the adapter's streams. The requests of closed streams compute their whole prompts.
Aborts and pauses leave streams open.
"""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from flashmoa_sglang.sglang.releases import RELEASE

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines, wait_for_costs
from flashmoa.errors import EngineDraining, StreamGone
from tests.integration.models import build_adapter
from tests.integration.support import (
    Words,
    check_final_request,
    complete_stream,
    generate,
    post_json,
    slow,
    start_special_engine,
    wait_until_prefilled,
)
from tests.waiting import LAG

pytestmark = pytest.mark.timeout(120)
# Seconds. Streams live longer than this, so a call that waits for their end takes longer.
PATIENCE = 20
TTL = 300


@pytest.fixture(scope="module")
async def engine(
    engines: LocalEngines, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[LocalEngine]:
    adapter = build_adapter(tmp_path_factory.mktemp("adapters") / "a", model, 1)
    arguments = ["--lora-paths", f"a={adapter}", "--lora-backend", "torch_native"]
    async with start_special_engine(engines, model, *arguments) as engine:
        yield engine


@pytest.fixture
async def http(engine: LocalEngine) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url, timeout=PATIENCE) as connected:
        yield connected


@pytest.mark.parametrize("fields", [{}, slow({"abort_all_requests": True})], ids=["wait", "abort"])
async def test_an_update_of_weights_ends_streams(
    client: EngineClient, http: httpx.AsyncClient, model: Path, words: Words, fields: dict[str, Any]
) -> None:
    """The streams have KV of the earlier weights. The update comes while a stream is prefilled."""
    text, long = words(300, 7000), words(4000, 7001)
    stream = await client.open_stream(text=text, ttl_seconds=TTL)
    await wait_until_prefilled(client, stream.id, 300 - LAG)
    growing = await client.open_stream(text=long, ttl_seconds=TTL)
    await wait_until_prefilled(client, growing.id, 1)
    updated = await post_json(http, "/update_weights_from_disk", model_path=str(model), **fields)
    assert updated["success"], updated
    with pytest.raises(StreamGone, match="drained"):
        await client.append(stream.id, 0, text=" and more")
    await check_final_request(client, stream.id, text + " and more", "drained")
    await check_final_request(client, growing.id, long + " of", "drained")
    new = await client.open_stream(text=text, ttl_seconds=TTL)
    await complete_stream(client, new.id)
    await check_final_request(client, new.id, text + " of")


@pytest.mark.skipif(RELEASE.BEGIN_UPDATE is None, reason="weights are updated in one step")
async def test_no_stream_is_open_while_weights_are_updated_in_steps(
    client: EngineClient, http: httpx.AsyncClient, words: Words
) -> None:
    text = words(300, 7020)
    stream = await client.open_stream(text=text, ttl_seconds=TTL)
    await wait_until_prefilled(client, stream.id, 300 - LAG)
    begun = await post_json(http, "/begin_weight_update")
    assert begun["success"], begun
    with pytest.raises(StreamGone, match="drained"):
        await client.append(stream.id, 0, text=" and more")
    with pytest.raises(EngineDraining, match="being changed"):
        await client.open_stream(text=text, ttl_seconds=TTL)
    ended = await post_json(http, "/end_weight_update")
    assert ended["success"], ended
    new = await client.open_stream(text=text, ttl_seconds=TTL)
    await complete_stream(client, new.id)
    await check_final_request(client, new.id, text + " of")


@pytest.mark.parametrize("mode", [slow("abort"), slow("in_place"), "retract"])
async def test_generation_is_paused_and_continued_while_streams_are_open(
    client: EngineClient, http: httpx.AsyncClient, words: Words, mode: str
) -> None:
    text = words(300, 7010)
    stream = await client.open_stream(text=text, ttl_seconds=TTL)
    await wait_until_prefilled(client, stream.id, 300 - LAG)
    growing = await client.open_stream(text=words(4000, 7011), ttl_seconds=TTL)
    (await http.post("/pause_generation", json={"mode": mode})).raise_for_status()
    opened = await client.open_stream(text=words(200, 7012), ttl_seconds=TTL)
    await client.append(stream.id, 0, text=" and more", end=True)
    (await http.post("/continue_generation", json={})).raise_for_status()
    await complete_stream(client, growing.id)
    await complete_stream(client, opened.id)
    await check_final_request(client, stream.id, text + " and more of it")
    await check_final_request(client, growing.id, words(4000, 7011) + " of")
    await check_final_request(client, opened.id, words(200, 7012) + " of")


async def test_an_adapter_is_unloaded_while_streams_are_open(
    client: EngineClient, http: httpx.AsyncClient, words: Words
) -> None:
    text = words(300, 7030)
    adapted = await post_json(http, "/prompt_streams", text=text, ttl_seconds=TTL, lora_path="a")
    await wait_until_prefilled(client, adapted["id"], 300 - LAG)
    plain = await client.open_stream(text=text, ttl_seconds=TTL)
    unloaded = await post_json(http, "/unload_lora_adapter", lora_name="a")
    assert unloaded["success"], unloaded
    with pytest.raises(StreamGone, match="drained"):
        await client.append(adapted["id"], 0, text=" and more")
    await complete_stream(client, plain.id)
    await check_final_request(client, plain.id, text + " of")


@pytest.mark.slow
async def test_memory_is_released_while_costs_are_measured(
    engines: LocalEngines, model: Path, words: Words
) -> None:
    """SGLang ends an engine that shall release its memory while a request runs."""
    async with (
        start_special_engine(engines, model, measures=True, has_costs=False) as engine,
        EngineClient(engine.url) as client,
        httpx.AsyncClient(base_url=engine.url, timeout=PATIENCE) as http,
    ):
        for path in ("/flush_cache", "/release_memory_occupation"):
            (await http.post(path, json={})).raise_for_status()
        assert (await client.info()).costs is None
        (await http.post("/resume_memory_occupation", json={})).raise_for_status()
        assert (await wait_for_costs(engine.url)).costs
        await generate(client, words(300, 7030), 4)
