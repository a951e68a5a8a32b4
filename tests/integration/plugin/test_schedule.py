"""Shortest job first, and KV pools that are too small for all requests and streams."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.support import (
    GREEDY,
    Words,
    start_special_engine,
)


@pytest.fixture(scope="module")
async def one_at_a_time(engines: LocalEngines, model: Path) -> AsyncGenerator[LocalEngine]:
    """An engine with shortest job first and priorities that runs one request at a time."""
    alone = ["--max-running-requests", "1", "--enable-priority-scheduling"]
    async with start_special_engine(engines, model, *alone, "--flashmoa-schedule", "sjf") as engine:
        yield engine


async def order_of_ends(engine: LocalEngine, bodies: dict[str, dict[str, Any]]) -> list[str]:
    """Let requests wait together for another request; return their names in order of their ends."""
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
