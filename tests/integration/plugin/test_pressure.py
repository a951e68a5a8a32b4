"""A KV pool that prompt streams fill: requests come first, and streams wait for room."""

import random
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.support import (
    GREEDY,
    RIDING,
    Words,
    complete_stream,
    fetch_kv_state,
    fetch_stream,
    generate,
    start_special_engine,
    wait_until_prefilled,
)
from tests.waiting import LAG

POOL = 4800


@pytest.fixture(scope="module")
async def engine(engines: LocalEngines, model: Path) -> AsyncGenerator[LocalEngine]:
    async with start_special_engine(engines, model, pool=POOL) as engine:
        yield engine


async def test_requests_that_arrive_together_start_at_once_if_streams_hold_the_pool(
    client: EngineClient, words: Words
) -> None:
    texts = [words(448, number) for number in range(8)]
    streams = [await client.open_stream(text=text, ttl_seconds=300) for text in texts]
    for stream in streams:
        await complete_stream(client, stream.id)
    held = (await fetch_kv_state(client)).protected
    assert held > 3500
    requests, steps = 6, [0] * 6
    # For each request, how many requests had begun when it reached its tenth step.
    begun_at_tenth: list[int] = []

    async def ask(number: int) -> None:
        sampling: dict[str, Any] = {**GREEDY, "max_new_tokens": 300, "stream_interval": 1}
        text = words(150, 100 + number)
        async with client.generate(text=text, sampling=sampling) as deltas:
            async for delta in deltas:
                before, steps[number] = steps[number], steps[number] + len(delta.token_ids)
                if before < 10 <= steps[number]:  # A busy machine sends several at once.
                    begun_at_tenth.append(sum(1 for done in steps if done))

    async with anyio.create_task_group() as group:
        for number in range(requests):
            group.start_soon(ask, number)
    assert steps == [300] * 6
    # All requests had begun before any request was ten steps ahead.
    assert min(begun_at_tenth) == requests
    after = await fetch_kv_state(client)
    assert after.gave_way > 0
    for text, stream in zip(texts, streams, strict=True):
        _, usage = await generate(client, text + " go", 5, stream.id)
        assert usage.prompt_stream is not None and usage.prompt_stream.status == "hit"


async def test_streams_without_room_wait_and_go_on_when_there_is_some(
    client: EngineClient, engine: LocalEngine, words: Words
) -> None:
    holder = await client.open_stream(text=words(4000, 1), ttl_seconds=300)
    await complete_stream(client, holder.id)
    texts = [words(900, 10 + number) for number in range(12)]
    waiting = [await client.open_stream(text=text, ttl_seconds=300) for text in texts]
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as http:
        with anyio.fail_after(30):
            while not any([(await fetch_stream(http, s.id))["waits_for_room"] for s in waiting]):  # noqa: ASYNC110
                await anyio.sleep(0.01)
        # They have taken what room there was, but for some that is left for requests.
        before = [await fetch_stream(http, stream.id) for stream in waiting]
        assert 0 < sum(state["prefilled_tokens"] for state in before) < POOL - 4000
        gave_way = (await fetch_kv_state(client)).gave_way
        _, usage = await generate(client, words(100, 30), 60)
        assert usage.completion_tokens == 60
        assert (await fetch_kv_state(client)).gave_way == gave_way
        # Steps for this request have not made increments that would have no room.
        after = [await fetch_stream(http, stream.id) for stream in waiting]
        assert [state["increments"] for state in after] == [s["increments"] for s in before]
    # When the first stream's KV is free, the others are filled while there is room.
    await client.delete_stream(holder.id)
    for stream in waiting[:3]:
        await wait_until_prefilled(client, stream.id, 900 - LAG)
    linked, usage = await generate(client, texts[0] + " of", 4, waiting[0].id)
    assert usage.late_tokens is not None and usage.late_tokens <= LAG + 2
    for stream in waiting[1:]:
        await client.delete_stream(stream.id)
    await client.flush_cache()
    assert linked == (await generate(client, texts[0] + " of", 4))[0]


@pytest.mark.slow
async def test_decodes_that_need_a_page_each_in_one_step_find_it_beside_rides(
    engines: LocalEngines, model: Path
) -> None:
    """Before 0.5.22, SGLang ends if it has no page for a decode in a step with prefill."""
    dice = random.Random(13)

    def ids(count: int) -> list[int]:
        return [dice.randrange(300, 3000) for _ in range(count)]

    async with (
        start_special_engine(
            engines, model, "--page-size", "64", pool=24576, environment=RIDING
        ) as modelled,
        EngineClient(modelled.url, timeout=60) as client,
        httpx.AsyncClient(base_url=modelled.url, timeout=60) as http,
    ):
        streams = [await client.open_stream(input_ids=ids(64)) for _ in range(6)]

        async def fill() -> None:
            for number in range(40):
                for stream in streams:
                    await client.append(stream.id, number, input_ids=ids(512))

        async with anyio.create_task_group() as group:
            group.start_soon(fill)
            sampling = {**GREEDY, "max_new_tokens": 70}
            body = {"input_ids": [ids(60) for _ in range(90)], "sampling_params": sampling}
            answers = (await http.post("/generate", json=body)).json()
        assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [70] * 90
        assert (await fetch_kv_state(client)).rode_along > 0
        for stream in streams:
            await client.delete_stream(stream.id)
