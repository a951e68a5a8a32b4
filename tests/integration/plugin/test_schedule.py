"""Shortest job first, and KV pools that are too small for all requests and streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient, PromptUsage
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.support import (
    GREEDY,
    LAG,
    RIDING,
    fetch_kv_state,
    generate,
    start_special_engine,
    wait_until_idle,
    wait_until_prefilled,
)

pytestmark = pytest.mark.anyio
Words = Callable[[int, int], str]


@pytest.fixture(scope="module")
async def one_at_a_time(engines: LocalEngines, model: Path) -> AsyncGenerator[LocalEngine]:
    """An engine with shortest job first and priorities, on which requests run one at a time."""
    alone = ["--max-running-requests", "1", "--enable-priority-scheduling"]
    async with start_special_engine(engines, model, *alone, "--flashmoa-schedule", "sjf") as engine:
        yield engine


async def order_of_ends(engine: LocalEngine, bodies: dict[str, dict[str, Any]]) -> list[str]:
    """Return the order in which requests end that have waited together for another one."""
    done: list[str] = []

    async def ask(name: str, body: dict[str, Any]) -> None:
        sampling = {**GREEDY, "max_new_tokens": body.pop("tokens")}
        answer = await http.post("/generate", json={**body, "sampling_params": sampling})
        assert answer.status_code == 200, answer.text
        done.append(name)

    async def in_flight(count: int) -> None:
        while True:
            info = (await http.get("/flashmoa/info")).json()
            if info["costs"] is not None and info["in_flight"]["requests"] >= count:
                return
            await anyio.sleep(0.02)

    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as http:
        await in_flight(0)
        async with anyio.create_task_group() as group:
            group.start_soon(ask, "first", {"text": "The one before", "tokens": 100, "priority": 9})
            await in_flight(1)
            for count, (name, body) in enumerate(bodies.items(), start=2):
                group.start_soon(ask, name, body)
                await in_flight(count)
        assert done[0] == "first"
    return done[1:]


async def test_the_shortest_job_runs_first(one_at_a_time: LocalEngine, words: Words) -> None:
    order = await order_of_ends(
        one_at_a_time,
        {
            "long": {"text": words(20, 1), "tokens": 300},
            "middling": {"text": words(20, 2), "tokens": 150},
            "expected to be short": {
                "text": words(20, 3),
                "tokens": 170,
                "expected_output_tokens": 3,
            },
            "short": {"text": words(20, 4), "tokens": 1},
        },
    )
    # Of the short ones, the one that has waited longer may be the first.
    assert set(order[:2]) == {"short", "expected to be short"}
    assert order[2:] == ["middling", "long"]


async def test_priorities_come_before_sizes(one_at_a_time: LocalEngine, words: Words) -> None:
    order = await order_of_ends(
        one_at_a_time,
        {
            "short": {"text": words(20, 5), "tokens": 1, "priority": 1},
            "urgent": {"text": words(2000, 6), "tokens": 50, "priority": 5},
        },
    )
    assert order == ["urgent", "short"]


# With this, SGLang expects short answers from the start.
EXPECTED_SHORT = ["--schedule-conservativeness", "0.1"]


async def decode(client: EngineClient, text: str, tokens: int, begun: anyio.Event) -> PromptUsage:
    """Decode exactly ``tokens`` tokens, a number that SGLang does not expect."""
    lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    sampling: dict[str, Any] = {"temperature": 0, "stream_interval": 1, **lengths}
    usage: PromptUsage | None = None
    async with client.generate(text=text, sampling=sampling) as deltas:
        async for delta in deltas:
            begun.set()
            usage = delta.usage or usage
    assert usage is not None
    return usage


def retractions(engine: LocalEngine) -> list[str]:
    lines = engine.log.read_text().splitlines()
    return [line for line in lines if "Retract requests" in line or "retract_decode" in line]


@pytest.mark.nightly
async def test_streams_fill_next_to_answers_that_may_become_long(
    engines: LocalEngines, model: Path, words: Words
) -> None:
    """There is room for a stream only because SGLang expects short answers. When they become long,
    the stream gives way, and no request is retracted."""
    args = [*EXPECTED_SHORT, "--chunked-prefill-size", "1024"]
    done: list[int] = []

    async def chat(number: int, begun: anyio.Event) -> None:
        usage = await decode(client, words(20, 500 + number), 850, begun)
        done.append(usage.completion_tokens)

    async with (
        start_special_engine(engines, model, *args, pool=4000, environment=RIDING) as engine,
        EngineClient(engine.url, timeout=120) as client,
    ):
        async with anyio.create_task_group() as group:
            for number in range(4):
                begun = anyio.Event()
                group.start_soon(chat, number, begun)
                await begun.wait()
            stream = await client.open_stream(text=words(600, 510), ttl_seconds=300)
            await client.append(stream.id, 0, text=words(200, 512)[3:], end=True)
            state = await wait_until_prefilled(client, stream.id, 799 - LAG)
            await generate(client, words(20, 511), 8)
            kv = await fetch_kv_state(client)
            assert not done
            assert (kv.pinned_streams, kv.gave_way) == (1, 0)
        assert done == [850] * 4
        assert (await fetch_kv_state(client)).gave_way >= 1
        # Room that may be needed again is not filled over and over.
        assert (await client.stream_state(stream.id)).computed_tokens < 2 * state.received_tokens
        assert not retractions(engine)
        await client.delete_stream(stream.id)
        await wait_until_idle(client)
