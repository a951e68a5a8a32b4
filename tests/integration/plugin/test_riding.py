"""Tokens of streams that ride right after a prefill of others, and prompts that ride in chunks."""

import re
from contextlib import AsyncExitStack
from itertools import pairwise
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
    decoding,
    logprobs,
    post_json,
    start_special_engine,
    wait_until_idle,
)
from tests.waiting import LAG

_Answer = dict[str, Any]
ARGUMENTS = ["--page-size", "16", "--decode-log-interval", "1"]


@pytest.mark.slow
async def test_answers_stay_the_same_when_tokens_ride_right_after_a_prefill(
    engines: LocalEngines, engine: LocalEngine, model: Path, words: Words
) -> None:
    """SGLang then knows all tokens of requests that decode: they were not in that prefill."""
    newcomers = [_ask_for(words(200, 71 + number), 3) for number in range(5)]
    async with (
        start_special_engine(engines, model, *ARGUMENTS, environment=RIDING) as modelled,
        EngineClient(modelled.url, timeout=60) as client,
        httpx.AsyncClient(base_url=modelled.url, timeout=60) as http,
    ):
        before = len(_steps(modelled))
        async with decoding(http, _ask_for(words(60, 70), 2000)) as long:
            stream = await client.open_stream(text="The", ttl_seconds=300)
            # Enough tokens that some wait in each step.
            await client.append(stream.id, 0, text=words(6000, 80)[3:])
            answers = [await post_json(http, "/generate", body) for body in newcomers]
        await client.delete_stream(stream.id)
        await wait_until_idle(client)
        steps = _steps(modelled)[before:]
    tokens: int = _meta(long)["completion_tokens"]
    alone = await _ask_alone(engine, [_ask_for(words(60, 70), tokens), *newcomers])
    for answer, expected in zip([long, *answers], alone, strict=True):
        # The text of an answer that was left may lack its last character.
        assert answer["text"] and expected["text"].startswith(answer["text"])
        assert logprobs(answer) == pytest.approx(logprobs(expected), abs=1e-3)
    new = {meta["prompt_tokens"] - meta["cached_tokens"] for meta in map(_meta, answers)}
    # The log of SGLang 0.5.12 counts whole pages.
    prefilled = {*new, *(-(-tokens // 16) * 16 for tokens in new)}
    # A step without prefill would be ``None``.
    assert any(step in prefilled and after is not None for step, after in pairwise(steps))


async def test_answers_stay_the_same_when_prompts_ride_in_chunks(
    engines: LocalEngines, engine: LocalEngine, model: Path, words: Words
) -> None:
    """While there is a stream, prompts that are too long for one step take several."""
    # The pool has room for these answers in full and a newcomer. SGLang 0.5.23 reserves the full
    # length of answers that do not end early.
    prompts = [words(60, 60 + number) for number in range(6)]
    newcomers = [_ask_for(words(900, 71 + number), 2, wanted={}) for number in range(4)]
    async with (
        start_special_engine(engines, model, *ARGUMENTS, environment=RIDING) as modelled,
        EngineClient(modelled.url, timeout=60) as client,
        httpx.AsyncClient(base_url=modelled.url, timeout=60) as http,
    ):
        before = len(_steps(modelled))
        async with AsyncExitStack() as stack:
            decodes = [
                await stack.enter_async_context(decoding(http, _ask_for(prompt, 1500, wanted={})))
                for prompt in prompts
            ]
            stream = await client.open_stream(text="The", ttl_seconds=300)
            answers = [await post_json(http, "/generate", body) for body in newcomers]
            # After its client has left, an answer is decoded until the engine notices.
            written, steps = _meta(decodes[0])["completion_tokens"], _steps(modelled)[before:]
        await client.delete_stream(stream.id)
        await wait_until_idle(client)
    bodies = [
        _ask_for(prompt, _meta(answer)["completion_tokens"], wanted={})
        for prompt, answer in zip(prompts, decodes, strict=True)
    ]
    alone = await _ask_alone(engine, [*bodies, *newcomers])
    for answer, expected in zip([*decodes, *answers], alone, strict=True):
        assert answer["text"] and expected["text"].startswith(answer["text"])
    chunks = [step for step in steps if step is not None]
    assert max(chunks) <= 512 and len(chunks) >= len(prompts) + 2 * len(newcomers)
    # The first has got tokens in steps with chunks, too.
    assert written > 1 + steps.count(None)


async def test_streams_progress_beside_decodes_where_nothing_can_ride(
    engines: LocalEngines, engine: LocalEngine, model: Path, words: Words
) -> None:
    """Without chunks, SGLang mixes nothing, and the engine is never idle while another decodes."""
    text, other = words(1000, 90), _ask_for(words(60, 91), 4000, wanted={})
    async with (
        start_special_engine(
            engines, model, "--chunked-prefill-size", "-1", environment=RIDING
        ) as modelled,
        EngineClient(modelled.url, timeout=60) as client,
        httpx.AsyncClient(base_url=modelled.url, timeout=60) as http,
    ):
        assert "cut into chunks" in ((await client.info()).kv[0].no_rides or "")
        async with decoding(http, other) as long:
            stream = await client.open_stream(text=text[:100], ttl_seconds=300)
            state = await client.append(stream.id, 0, text=text[100:])
            with anyio.fail_after(30):
                while state.prefilled_tokens < state.received_tokens - LAG:
                    assert (_meta(long)["finish_reason"] or {}).get("type") != "length"
                    await anyio.sleep(0.02)
                    state = await client.stream_state(stream.id)
            answer = await post_json(
                http, "/generate", _ask_for(text, 5, {"prompt_stream_id": stream.id})
            )
        await wait_until_idle(client)
    assert _meta(answer)["prompt_stream"]["status"] == "hit"
    assert _meta(answer)["late_tokens"] <= LAG
    other = _ask_for(words(60, 91), _meta(long)["completion_tokens"], {})
    expected, alone = await _ask_alone(engine, [_ask_for(text, 5, {}), other])
    assert answer["text"] == expected["text"] and alone["text"].startswith(long["text"])


_LOG_PROBABILITIES = {"return_logprob": True, "top_logprobs_num": 2}


def _ask_for(text: str, tokens: int, wanted: dict[str, Any] = _LOG_PROBABILITIES) -> dict[str, Any]:
    sampling = {**GREEDY, "max_new_tokens": tokens, "stream_interval": 1}
    return {"text": text, "sampling_params": sampling, **wanted}


async def _ask_alone(engine: LocalEngine, bodies: list[dict[str, Any]]) -> list[_Answer]:
    """Ask one after the other an engine where nothing rides along, and that is not slowed down."""
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as http:
        return [await post_json(http, "/generate", body) for body in bodies]


def _meta(answer: _Answer) -> dict[str, Any]:
    return answer["meta_info"]


def _steps(engine: LocalEngine) -> list[int | None]:
    """Return the steps in an engine's log: how many tokens they prefilled, or ``None``."""
    found = re.findall(r"Prefill batch.*#new-token: (\d+)|Decode batch", engine.log.read_text())
    return [int(tokens) if tokens else None for tokens in found]
