"""A mix of ordinary requests, several at once."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import anyio

from flashmoa.engine import EngineClient
from flashmoa_bench.harness.requests import ask, random_ids

_PROMPT = (16, 256)
_OUTPUT = (8, 48)
MOST_TOKENS = _PROMPT[1] + _OUTPUT[1]

Lengths = Sequence[tuple[int, int]]


def lengths(requests: int, dice: random.Random) -> list[tuple[int, int]]:
    """Tokens of prompt and output for every request of a round."""
    return [(dice.randint(*_PROMPT), dice.randint(*_OUTPUT)) for _ in range(requests)]


async def play(
    engine: EngineClient, lengths: Lengths, concurrency: int, dice: random.Random
) -> float:
    """One round on an empty cache, with fresh tokens: tokens per second, prompt and output."""
    await engine.flush_cache()
    waiting = [(random_ids(dice, prompt), output) for prompt, output in lengths]
    waiting.reverse()

    async def client() -> None:
        while waiting:
            prompt, output = waiting.pop()
            await ask(engine, prompt, output)

    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(concurrency):
            group.start_soon(client)
    return sum(map(sum, lengths)) / (time.perf_counter() - started)
