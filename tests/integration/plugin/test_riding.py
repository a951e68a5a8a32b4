"""Tokens of streams that ride in the first step after a prefill of other requests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise, product
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
    start_special_engine,
    wait_until_idle,
    wait_until_prefilled,
)

pytestmark = pytest.mark.anyio
Words = Callable[[int, int], str]

MATRIX = [
    pytest.param(
        overlap,
        page,
        id=f"overlap {'on' if overlap else 'off'}, pages of {page}",
        marks=[] if (overlap, page) == (True, 16) else [pytest.mark.slow],
    )
    for overlap, page in product((True, False), (1, 16))
]


@pytest.mark.parametrize(("overlap", "page"), MATRIX)
async def test_answers_stay_the_same_when_tokens_ride_right_after_a_prefill(
    engines: LocalEngines, model: Path, words: Words, overlap: bool, page: int
) -> None:
    """Of those that decode, SGLang knows all tokens then, because they were not in that prefill."""
    arguments = ["--page-size", str(page), "--decode-log-interval", "1"]
    arguments += [] if overlap else ["--disable-overlap-schedule"]
    long = _ask_for(words(60, 70), 120)
    newcomers = [_ask_for(words(200, 71 + number), 3) for number in range(2)]
    answers: list[dict[str, Any]] = []
    async with (
        start_special_engine(engines, model, *arguments, environment=RIDING) as engine,
        EngineClient(engine.url, timeout=60) as client,
        httpx.AsyncClient(base_url=engine.url, timeout=60) as http,
    ):
        alone = [await _ask(http, body) for body in (long, *newcomers)]
        await client.flush_cache()
        before = len(_steps(engine))
        async with anyio.create_task_group() as group:
            group.start_soon(_decode, http, long, answers, begun := anyio.Event())
            await begun.wait()
            stream = await client.open_stream(text="The", ttl_seconds=300)
            # So many tokens that some wait in each step.
            await client.append(stream.id, 0, text=words(6000, 80)[3:])
            await wait_until_prefilled(client, stream.id, 16)
            others = [await _ask(http, body) for body in newcomers]
            assert not answers, "the long answer ended before the others"
        await client.delete_stream(stream.id)
        await wait_until_idle(client)
        steps = _steps(engine)[before:]
    for answer, expected in zip([*answers, *others], alone, strict=True):
        assert answer["text"] == expected["text"]
        assert _log_probabilities(answer) == pytest.approx(_log_probabilities(expected), abs=1e-3)
    # The log counts whole pages.
    prefilled = {
        -(-(meta["prompt_tokens"] - meta["cached_tokens"]) // page) * page
        for meta in map(_meta, others)
    }
    # A step without prefill would be ``None``.
    assert any(step in prefilled and after is not None for step, after in pairwise(steps))


def _ask_for(text: str, tokens: int) -> dict[str, Any]:
    sampling = {**GREEDY, "max_new_tokens": tokens}
    wanted = {"return_logprob": True, "top_logprobs_num": 2}
    return {"text": text, "sampling_params": sampling, **wanted}


async def _ask(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    return (await http.post("/generate", json=body)).raise_for_status().json()


async def _decode(
    http: httpx.AsyncClient, body: dict[str, Any], answers: list[dict[str, Any]], begun: anyio.Event
) -> None:
    """Add the answer to ``answers`` once it is complete; set ``begun`` at its first token."""
    last: dict[str, Any] = {}
    async with http.stream("POST", "/generate", json={**body, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                last = json.loads(line.removeprefix("data: "))
                begun.set()
    answers.append(last)


def _meta(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["meta_info"]


def _log_probabilities(answer: dict[str, Any]) -> list[float]:
    meta = _meta(answer)
    tops = [token for top in meta["output_top_logprobs"] for token in top]
    return [token[0] for token in [*meta["output_token_logprobs"], *tops]]


def _steps(engine: LocalEngine) -> list[int | None]:
    """Return the steps in an engine's log: how many tokens they prefilled, or ``None``."""
    found = re.findall(r"Prefill batch.*#new-token: (\d+)|Decode batch", engine.log.read_text())
    return [int(tokens) if tokens else None for tokens in found]
