"""Prompt streams and other requests on one engine."""

import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack
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
    RIDING,
    Words,
    decoding,
    fetch_kv_state,
    generate,
    logprobs,
    nightly_except,
    start_special_engine,
    wait_until_idle,
    wait_until_prefilled,
)
from tests.waiting import LAG, until

# Whether tokens ride along with decode steps depends on the costs of the steps. On the modelled GPU
# tokens always ride along, unless the budget forbids it.
WAYS: dict[str, tuple[list[str], dict[str, str]]] = {
    "riding along": ([], RIDING),
    "without the overlap schedule": (["--disable-overlap-schedule"], RIDING),
    "two requests at once": (["--max-running-requests", "2"], RIDING),
    "after decodes": (["--flashmoa-itl-budget", "1"], RIDING),
    "on the CPU": ([], {}),
}


@pytest.fixture(scope="module", params=nightly_except(WAYS, "riding along"))
async def busy_engine(
    request: pytest.FixtureRequest, engines: LocalEngines, model: Path
) -> AsyncGenerator[LocalEngine]:
    arguments, environment = WAYS[request.param]
    async with start_special_engine(engines, model, *arguments, environment=environment) as engine:
        yield engine


@pytest.fixture
def way(busy_engine: LocalEngine, request: pytest.FixtureRequest) -> str:
    return request.node.callspec.params["busy_engine"]


@pytest.fixture
async def client(busy_engine: LocalEngine) -> AsyncGenerator[EngineClient]:
    async with EngineClient(busy_engine.url, timeout=60) as connected:
        yield connected
        await wait_until_idle(connected)


@pytest.fixture
async def plain(engine: LocalEngine) -> AsyncGenerator[EngineClient]:
    """A client of an engine that runs nothing else, and is not slow like a modelled GPU."""
    async with EngineClient(engine.url, timeout=60) as connected:
        yield connected


async def wait_for_tokens(answers: Iterable[dict[str, Any]], more: int) -> None:
    """Wait until each answer has ``more`` further tokens."""
    wanted = [(answer, answer["meta_info"]["completion_tokens"] + more) for answer in answers]
    await until(lambda: all(one["meta_info"]["completion_tokens"] >= n for one, n in wanted))


async def test_streams_and_decodes_change_no_answers(
    client: EngineClient, plain: EngineClient, way: str, words: Words
) -> None:
    """The streams' tokens ride along with the decodes, or wait until nothing decodes."""
    prompts = [words(40, number) for number in range(2)]
    texts = [words(700, 50 + number) + words(30, 70)[3:] for number in range(4)]
    rode_before = (await fetch_kv_state(client)).rode_along
    sampling: dict[str, Any] = {**GREEDY, "max_new_tokens": 3000, "stream_interval": 1}
    async with (
        httpx.AsyncClient(base_url=client.url, timeout=120) as http,
        AsyncExitStack() as stack,
    ):
        decodes: dict[str, dict[str, Any]] = {}
        for prompt in prompts:
            body = {"text": prompt, "sampling_params": sampling}
            decodes[prompt] = await stack.enter_async_context(decoding(http, body))
        streams = [
            await client.open_stream(text=words(700, 50 + number), ttl_seconds=300)
            for number in range(4)
        ]
        for stream in streams:
            await client.append(stream.id, 0, text=words(30, 70)[3:], end=True)
        if WAYS[way][1] and way != "after decodes":
            for stream in streams:
                await wait_until_prefilled(client, stream.id, 729 - LAG)
        else:
            await wait_for_tokens(decodes.values(), 30)
        states = [await client.stream_state(stream.id) for stream in streams]
        rode = (await fetch_kv_state(client)).rode_along - rode_before
        await wait_for_tokens(decodes.values(), 10)
    # Without a forward for streams alone, all that is computed beside decodes has ridden along.
    computed = sum(state.computed_tokens for state in states)
    assert computed <= rode
    if way == "after decodes":
        assert rode == 0
    elif WAYS[way][1]:
        assert rode >= 4 * (729 - LAG)
    for prompt, answer in decodes.items():
        tokens = answer["meta_info"]["completion_tokens"]
        assert 20 <= tokens < 3000
        alone, _ = await generate(plain, prompt, tokens + 8)
        assert alone.startswith(answer["text"])
    linked: list[str] = []
    for text, stream in zip(texts, streams, strict=True):
        await wait_until_prefilled(client, stream.id, 729)
        answer, usage = await generate(client, text + " of", 8, stream.id)
        linked.append(answer)
        assert usage.late_tokens is not None and usage.late_tokens < 16
    assert linked == [(await generate(plain, text + " of", 8))[0] for text in texts]


async def test_log_probabilities_stay_the_same_when_streams_ride_along(
    client: EngineClient, engine: LocalEngine, way: str, words: Words
) -> None:
    """One request has log-probabilities of its answer, one also of its prompt, one has none."""
    bodies: list[dict[str, Any]] = [
        {"text": words(40, 90), "return_logprob": True, "top_logprobs_num": 2},
        {"text": words(40, 91), "return_logprob": True, "logprob_start_len": 0},
        {"text": words(40, 92)},
    ]
    for body in bodies:
        body["sampling_params"] = {**GREEDY, "max_new_tokens": 80, "stream_interval": 1}
    answers: list[dict[str, Any]] = [{}, {}, {}]

    async def ask(number: int, begun: anyio.Event) -> None:
        async with http.stream("POST", "/generate", json={**bodies[number], "stream": True}) as got:
            async for line in got.aiter_lines():
                if line.startswith("data: {"):
                    answers[number] = json.loads(line.removeprefix("data: "))
                    begun.set()

    async with httpx.AsyncClient(base_url=engine.url, timeout=120) as http:
        alone = [(await http.post("/generate", json=body)).json() for body in bodies]
    async with httpx.AsyncClient(base_url=client.url, timeout=120) as http:
        rode_before = (await fetch_kv_state(client)).rode_along
        async with anyio.create_task_group() as group:
            for number in range(len(bodies)):
                group.start_soon(ask, number, begun := anyio.Event())
                await begun.wait()
            # The requests' first token is in the cache. The stream begins with another token.
            stream = await client.open_stream(text=words(500, 93).removeprefix("The"))
            await client.append(stream.id, 0, text=words(30, 70)[3:], end=True)
            await wait_until_prefilled(client, stream.id, 528 - LAG)
        rode = (await fetch_kv_state(client)).rode_along - rode_before
        await client.delete_stream(stream.id)
    if WAYS[way][1]:
        assert (rode > 0) == (way != "after decodes")
    for answer, expected in zip(answers, alone, strict=True):
        assert answer["text"] == expected["text"]
        assert logprobs(answer) == pytest.approx(logprobs(expected), abs=1e-3)
    assert [len(logprobs(answer)) for answer in answers] == [80 * 3, 80 + 39, 0]


async def test_a_request_comes_between_the_forwards_of_a_long_stream(
    client: EngineClient, plain: EngineClient, words: Words
) -> None:
    text = words(6000, 9)
    stream = await client.open_stream(text=text)
    await wait_until_prefilled(client, stream.id, 1)
    other, _ = await generate(client, words(50, 10), 20)
    linked, usage = await generate(client, text + " of", 8, stream.id)
    assert usage.prompt_tokens == 6001
    assert other == (await generate(plain, words(50, 10), 20))[0]
    assert linked == (await generate(plain, text + " of", 8))[0]


async def test_a_structured_answer_does_not_wait_for_streams(
    engines: LocalEngines, model: Path, words: Words
) -> None:
    """Its grammar is compiled while a stream waits for the end of another answer."""
    arguments = ["--flashmoa-itl-budget", "1", "--constrained-json-disable-any-whitespace"]
    long = {"text": words(40, 90), "sampling_params": {**GREEDY, "max_new_tokens": 3000}}
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
        stream = await client.open_stream(text=words(1000, 91))
        await client.append(stream.id, 0, end=True)
        async with client.generate(text=words(20, 93), sampling=structured) as deltas:
            answer = "".join([delta.text async for delta in deltas])
        after = await client.stream_state(stream.id)
        assert answer in ("true", "false")
        assert after.received_tokens == 1000 > after.prefilled_tokens
        await client.delete_stream(stream.id)
        group.cancel_scope.cancel()
