"""On a real engine, prefills wait until there is enough work to hide copies of experts."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.support import GREEDY, start_special_engine, wait_until_measured

pytestmark = [pytest.mark.anyio, pytest.mark.nightly]

# The number of tokens in each prompt of a burst.
BURST = 220
ENOUGH = 4 * BURST + 1


Prompt = tuple[int, ...]


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    lengths = [30, 200, 3, *[BURST] * 5]
    return [tuple(Random(seed).choices(range(4096), k=k)) for seed, k in enumerate(lengths)]


@pytest.fixture(scope="module")
async def expected(
    engines: LocalEngines, experts_model: Path, prompts: list[Prompt]
) -> list[tuple[str, list[float]]]:
    """The answers of an engine with all experts on the device."""
    async with (
        start_special_engine(engines, experts_model) as engine,
        EngineClient(engine.url, timeout=60) as client,
    ):
        assert (await client.info()).kv[0].experts is None
        await wait_until_measured(engine)
        return [await answer(client, prompt) for prompt in prompts]


async def answer(client: EngineClient, prompt: Prompt) -> tuple[str, list[float]]:
    """Return an answer's text and log-probabilities."""
    body: dict[str, Any] = {"input_ids": prompt, "sampling_params": GREEDY | {"max_new_tokens": 12}}
    body |= {"return_logprob": True, "logprob_start_len": 0}
    reply = await client._http.post("/generate", json=body)
    reply.raise_for_status()
    result = reply.json()
    meta = result["meta_info"]
    logprobs = meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]
    return result["text"], [logprob[0] for logprob in logprobs]


@pytest.fixture(scope="module")
async def patient(engines: LocalEngines, experts_model: Path) -> AsyncGenerator[LocalEngine]:
    """An engine that waits for more than four prompts, even if a slow machine sends the fifth."""
    flags = ["--flashmoa-saturation", str(ENOUGH), "--flashmoa-saturation-wait", "3"]
    async with start_special_engine(
        engines, experts_model, "--flashmoa-asyncep", "h2d", *flags
    ) as engine:
        yield engine


async def test_a_burst_is_one_forward_and_a_lone_request_runs_after_a_wait(
    patient: LocalEngine, prompts: list[Prompt], expected: list[tuple[str, list[float]]]
) -> None:
    burst = list(zip(prompts, expected, strict=True))[-5:]
    answers: dict[Prompt, tuple[str, list[float]]] = {}
    async with EngineClient(patient.url, timeout=60) as client:
        assert (await client.info()).prefills_wait_for == ENOUGH
        await wait_until_measured(patient)

        async def ask(prompt: Prompt) -> None:
            answers[prompt] = await answer(client, prompt)

        async with anyio.create_task_group() as group:
            for prompt, _ in burst:
                group.start_soon(ask, prompt)
        assert (5, 5 * BURST) in forwards(patient)
        answers[prompts[0]] = await answer(client, prompts[0])
    for prompt, (text, logprobs) in [*burst, (prompts[0], expected[0])]:
        assert answers[prompt][0] == text
        # Sums may be computed in another order, such as in a larger batch.
        assert answers[prompt][1] == pytest.approx(logprobs, abs=1e-4)


async def test_tokens_that_several_requests_share_count_once(patient: LocalEngine) -> None:
    shared = Random(99).choices(range(4096), k=BURST)
    siblings = [[*shared, *Random(number).choices(range(4096), k=9)] for number in range(6)]
    before = len(forwards(patient))
    async with (
        EngineClient(patient.url, timeout=60) as client,
        anyio.create_task_group() as group,
    ):
        for prompt in siblings:
            group.start_soon(partial(client.prefill_only, input_ids=prompt))
    # None ran before the sixth had come, although four prompts have enough tokens if shared ones
    # count every time. If requests can share only between forwards, one runs before the others.
    assert 4 * (BURST + 9) > ENOUGH
    together, one_ahead = [(6, BURST + 6 * 9)], [(1, BURST + 9), (5, 5 * 9)]
    assert forwards(patient)[before:] in (together, one_ahead)


def forwards(engine: LocalEngine) -> list[tuple[int, int]]:
    """Return the numbers of requests and of new tokens of each prefill so far, from the log."""
    lines = re.findall(
        r"Prefill batch.*#new-seq: (\d+), #new-token: (\d+),", engine.log.read_text()
    )
    return [(int(requests), int(tokens)) for requests, tokens in lines]
