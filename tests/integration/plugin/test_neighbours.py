"""Prompt streams and other requests on one engine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.support import (
    GREEDY,
    fetch_kv_state,
    generate,
    start_special_engine,
    wait_until_idle,
    wait_until_prefilled,
)

pytestmark = pytest.mark.anyio

# The value of --flashmoa-stream-share decides whether tokens ride along with decode steps or wait
# for a forward for streams alone.
SHARES = {"riding along": "0.95", "now and then": "0.05", "level by level": "0.95"}


@pytest.fixture(scope="module", params=SHARES)
async def busy_engine(
    request: pytest.FixtureRequest, engines: LocalEngines, model: Path
) -> AsyncGenerator[LocalEngine]:
    # One of the engines runs without the overlap schedule, which is SGLang's default.
    level = ["--flashmoa-intra-turn", "level", "--disable-overlap-schedule"]
    extra = level if request.param == "level by level" else []
    share = ["--flashmoa-stream-share", SHARES[request.param]]
    async with start_special_engine(engines, model, *share, *extra) as engine:
        yield engine


@pytest.fixture
def rides(busy_engine: LocalEngine, request: pytest.FixtureRequest) -> bool:
    """Whether tokens of streams ride along with decode steps on this engine."""
    return float(SHARES[request.node.callspec.params["busy_engine"]]) > 0.5


@pytest.fixture
async def client(busy_engine: LocalEngine) -> AsyncGenerator[EngineClient]:
    async with EngineClient(busy_engine.url, timeout=60) as connected:
        yield connected
        await wait_until_idle(connected)


async def test_streams_fill_while_others_decode_without_changing_answers(
    client: EngineClient, rides: bool, words: Callable[[int, int], str]
) -> None:
    prompts = [words(40, number) for number in range(3)]
    rode_before = (await fetch_kv_state(client)).rode_along
    answers: dict[str, tuple[str, int]] = {}
    decoding, filled = anyio.Event(), anyio.Event()

    async def ask(prompt: str) -> None:
        sampling: dict[str, Any] = {**GREEDY, "max_new_tokens": 3000, "stream_interval": 1}
        body = {"text": prompt, "sampling_params": sampling, "stream": True}
        # Tokens never ride along with a request for log-probabilities, whatever the costs are.
        body["return_logprob"] = not rides
        async with http.stream("POST", "/generate", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    answers[prompt] = event["text"], event["meta_info"]["completion_tokens"]
                    decoding.set()
                    if filled.is_set() and answers[prompt][1] >= 100:
                        return

    async with (
        httpx.AsyncClient(base_url=client.url, timeout=120) as http,
        anyio.create_task_group() as group,
    ):
        for prompt in prompts:
            group.start_soon(ask, prompt)
        await decoding.wait()
        streams = [
            await client.open_stream(text=words(700, 50 + number), ttl_seconds=300)
            for number in range(4)
        ]
        for stream in streams:
            await client.append(stream.id, 0, text=words(30, 70)[3:], end=True)
        with anyio.fail_after(60):
            while not filled.is_set():
                states = [(await client.stream_state(s.id)).prefilled_tokens for s in streams]
                if sum(states):
                    filled.set()
                await anyio.sleep(0.02)
    rode = (await fetch_kv_state(client)).rode_along - rode_before
    assert rode > 0 if rides else rode == 0
    for prompt, (text, tokens) in answers.items():
        assert 100 <= tokens < 3000
        alone, _ = await generate(client, prompt, tokens + 8)
        assert alone.startswith(text)
    texts = [words(700, 50 + number) + words(30, 70)[3:] + " of" for number in range(4)]
    linked: list[str] = []
    for text, stream in zip(texts, streams, strict=True):
        await wait_until_prefilled(client, stream.id, 729)
        answer, usage = await generate(client, text, 8, stream.id)
        linked.append(answer)
        assert usage.late_tokens is not None and usage.late_tokens < 16
    await client.flush_cache()
    assert linked == [(await generate(client, text, 8))[0] for text in texts]


async def test_a_request_overtakes_an_increment_that_is_computed_in_chunks(
    client: EngineClient, words: Callable[[int, int], str]
) -> None:
    """A long increment in chunks comes first, then another request, then the final request."""
    text = words(6000, 9)
    stream = await client.open_stream(text=text)
    other, _ = await generate(client, words(50, 10), 20)
    linked, usage = await generate(client, text + " of", 8, stream.id)
    assert usage.prompt_tokens == 6001
    await client.flush_cache()
    assert other == (await generate(client, words(50, 10), 20))[0]
    assert linked == (await generate(client, text + " of", 8))[0]


async def test_streams_pause_in_proportion_to_the_tokens_they_took(
    client: EngineClient, words: Callable[[int, int], str]
) -> None:
    """The pause after a short stream follows from its own tokens, not from a whole chunk's."""
    filled = 0
    sampling: dict[str, Any] = {**GREEDY, "max_new_tokens": 900, "stream_interval": 1}
    async with client.generate(text=words(40, 1), sampling=sampling) as deltas:
        await anext(deltas)
        for number in range(3):
            stream = await client.open_stream(text=words(60, 80 + number))
            async for _ in deltas:
                if (await client.stream_state(stream.id)).prefilled_tokens > 0:
                    filled += 1
                    break
            await client.delete_stream(stream.id)
    assert filled == 3


async def test_a_structured_answer_does_not_wait_for_streams(
    engines: LocalEngines, model: Path, words: Callable[[int, int], str]
) -> None:
    """Its grammar is compiled while a stream pauses for the decode steps of others."""
    arguments = ["--flashmoa-stream-share", "0.005", "--constrained-json-disable-any-whitespace"]
    # Tokens do not ride along with a request for log-probabilities.
    long: dict[str, Any] = {"text": words(40, 90), "return_logprob": True}
    long["sampling_params"] = {**GREEDY, "max_new_tokens": 3000}
    structured = {"temperature": 0, "max_new_tokens": 8, "json_schema": '{"type": "boolean"}'}
    async with (
        start_special_engine(engines, model, *arguments) as engine,
        EngineClient(engine.url, timeout=120) as client,
        httpx.AsyncClient(base_url=engine.url, timeout=120) as http,
        anyio.create_task_group() as group,
    ):
        group.start_soon(partial(http.post, "/generate", json=long))
        while not (await fetch_kv_state(client)).protected:  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(0.01)
        stream = await client.open_stream(text=words(800, 91))
        before = await wait_until_prefilled(client, stream.id, 790)
        await client.append(stream.id, 0, text=words(200, 92)[3:], end=True)
        await wait_for_increment(http, stream.id)
        async with client.generate(text=words(20, 93), sampling=structured) as deltas:
            answer = "".join([delta.text async for delta in deltas])
        after = await client.stream_state(stream.id)
        assert answer in ("true", "false")
        assert after.prefilled_tokens == before.prefilled_tokens
        await client.delete_stream(stream.id)
        group.cancel_scope.cancel()


async def test_answers_stay_the_same_when_streams_ride_along_with_their_decodes(
    engines: LocalEngines, model: Path, words: Callable[[int, int], str]
) -> None:
    """Also those of a request whose first decode follows another request's prefill."""
    async with (
        start_special_engine(engines, model, "--flashmoa-stream-share", "1.0") as engine,
        EngineClient(engine.url, timeout=60) as client,
    ):
        for turn in range(0, 60, 3):
            prompts = [words(60, turn + number) for number in range(3)]
            expected = [(await generate(client, prompt, 32))[0] for prompt in prompts]
            await client.flush_cache()
            stream = await client.open_stream(text="The")
            answers = dict[str, str]()

            async def ask(prompt: str, answers: dict[str, str] = answers) -> None:
                answers[prompt], _ = await generate(client, prompt, 32)

            async with anyio.create_task_group() as group:
                for number, prompt in enumerate(prompts):
                    group.start_soon(ask, prompt)
                    await client.append(stream.id, number, text=words(20, 200 + turn + number)[3:])
            await client.delete_stream(stream.id)
            assert [answers[prompt] for prompt in prompts] == expected, turn
        assert (await fetch_kv_state(client)).rode_along > 0


async def wait_for_increment(http: httpx.AsyncClient, stream_id: str) -> None:
    """Wait until an increment of a stream has been sent to the scheduler."""
    with anyio.fail_after(30):
        while True:
            state = (await http.get(f"/prompt_streams/{stream_id}")).json()
            if state["prefilling"]:
                return
            await anyio.sleep(0.01)
