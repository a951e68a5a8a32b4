"""A stream follows a call inside the engine, and the call's bytes stay as they are."""

import json
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.plugin.test_hearing import (
    CALL,
    CHAT,
    TOOL,
    ask,
    forced,
    in_flight,
    joined,
    listening,
    text_of,
)
from tests.integration.support import (
    BOTH_ON_ONE_CORE,
    TWO_REPLICAS,
    Body,
    fetch_stream,
    generate,
    start_special_engine,
    wait_for_state,
    wait_until_idle,
)

BEFORE = "The plan of the first agent: "
CHATS = "/v1/chat/completions"
LONG = {**CHAT, "max_tokens": 200, "ignore_eos": True, "separate_reasoning": False}


# An engine's arguments, and its environment.
RANKS = [
    pytest.param(([], {}), id="one"),
    pytest.param((["--dp-size", "2"], TWO_REPLICAS), id="dp", marks=pytest.mark.nightly),
    pytest.param((["--tp-size", "2"], BOTH_ON_ONE_CORE), id="tp", marks=pytest.mark.nightly),
]


@pytest.fixture(scope="module", params=RANKS)
async def engine(
    request: pytest.FixtureRequest, engines: LocalEngines, thinking_model: Path
) -> AsyncGenerator[LocalEngine]:
    """An engine that parses reasoning and tool calls, with one rank or two."""
    arguments, environment = request.param
    async with start_special_engine(
        engines,
        thinking_model,
        "--enable-cache-report", "--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3",
        "--served-model-name", "m", *arguments,
        environment=environment,
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture(autouse=True)
async def nothing_is_left(client: EngineClient, http: httpx.AsyncClient) -> AsyncGenerator[None]:
    await client.flush_cache()
    yield
    await wait_until_idle(client)
    names = ("requests", "heard_calls", "awaited_calls", "channels")
    with anyio.fail_after(10):
        while any(map((await in_flight(http)).get, names)):  # noqa: ASYNC110
            await anyio.sleep(0.02)


class Followed:
    """A prompt stream that follows a call."""

    def __init__(self, http: httpx.AsyncClient, id_: str, call: str) -> None:
        self.http, self.id, self.call, self.seq = http, id_, call, 0

    async def append(self, **body: Any) -> httpx.Response:
        path = f"/prompt_streams/{self.id}/append"
        answer = await self.http.post(path, json={"seq": self.seq, **body})
        self.seq += answer.status_code == 200
        return answer

    async def state(self) -> Body:
        return await fetch_stream(self.http, self.id)

    async def until(self, condition: Callable[[Body], object]) -> Body:
        return await wait_for_state(self.http, self.id, condition)


@asynccontextmanager
async def following(http: httpx.AsyncClient, call: str) -> AsyncGenerator[Followed]:
    opened = (await http.post("/prompt_streams", json={"text": BEFORE})).json()["id"]
    followed = Followed(http, opened, call)
    for _ in range(2):  # The client may repeat the append.
        answer = await http.post(f"/prompt_streams/{opened}/append", json={"seq": 0, "call": call})
        assert answer.status_code == 200, answer.text
    followed.seq = 1
    try:
        yield followed
    finally:
        with anyio.CancelScope(shield=True):
            await http.delete(f"/prompt_streams/{opened}")


def new_call() -> str:
    return secrets.token_hex(16)


def content_of(answer: str) -> str:
    """Return the text of a chat's answer, streamed or whole."""
    if answer.startswith("data: "):
        return joined(answer)[0]["content"]
    return json.loads(answer)["choices"][0]["message"]["content"] or ""


WITH_TOOLS: Body = {"tools": [TOOL], "separate_reasoning": False}
FOLLOWED: dict[str, Body] = {
    "text": LONG,
    "tools that are not called": {**CHAT, **forced("I need no tool.", **WITH_TOOLS)},
    "a text and a tool call": {**CHAT, **forced(f"Let me look there.\n{CALL}", **WITH_TOOLS)},
    # SGLang's parser takes the whole text for reasoning, and streams do not follow reasoning.
    "a thought": {**CHAT, **forced("<think>Hm, well.</think>Walk to the lake, and swim.")},
}  # fmt: skip


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", FOLLOWED)
async def test_a_stream_has_what_its_call_has_written(
    http: httpx.AsyncClient, client: EngineClient, kind: str, is_streamed: bool
) -> None:
    call, body = new_call(), {**FOLLOWED[kind], "stream": is_streamed}
    plain = await ask(http, CHATS, body)
    content = content_of(plain)
    prompt = BEFORE + content + " Is that a good plan?"
    expected, _ = await generate(client, prompt, 4)
    whole = await client.open_stream(text=BEFORE + content)
    await client.delete_stream(whole.id)
    await wait_until_idle(client)
    await client.flush_cache()
    async with following(http, call) as stream:
        answer = await ask(http, CHATS, body, call)
        assert joined(answer) == joined(plain) if is_streamed else answer == plain
        # No client traffic has told the stream of the text.
        state = await stream.until(lambda state: state["received_tokens"] >= whole.received_tokens)
        assert state["received_tokens"] == whole.received_tokens
        assert bool(content) == (kind != "a thought")
        if content:
            refused = await stream.append(text=" Is that a good plan?", end=True)
            assert refused.status_code == 400, refused.text
            assert f"{len(content)} characters of the call" in refused.json()["error"]["message"]
        rest = {"start": len(BEFORE), "text": content + " Is that a good plan?", "end": True}
        assert (await stream.append(**rest)).status_code == 200
        state = await stream.until(lambda s: s["prefilled_tokens"] == s["received_tokens"])
        linked, usage = await generate(client, prompt, 4, stream.id)
        assert usage.prompt_stream is not None and usage.prompt_stream.status == "hit"
        assert usage.late_tokens is not None and usage.late_tokens <= 2
        assert usage.streamed_tokens is not None
        assert usage.streamed_tokens >= state["received_tokens"] - 2
        assert linked == expected


async def test_several_streams_and_a_channel_follow_a_call_from_its_beginning(
    http: httpx.AsyncClient, client: EngineClient
) -> None:
    async with listening(http) as ear:
        call = ear.name_call()
        heard = await run_followed(http, call)
        events = await ear.until_end(call)
        assert text_of(events) == heard
    # A call is followed by the first stream alone, then by a late stream and a late channel.
    call, answers, answered = new_call(), list[str](), anyio.Event()

    async def run() -> None:
        answers.append(await ask(http, CHATS, {**LONG, "max_tokens": 400}, call))
        answered.set()

    async with following(http, call) as first, anyio.create_task_group() as group:
        begun = (await first.state())["received_tokens"]
        group.start_soon(run)
        await first.until(lambda state: state["received_tokens"] > begun + 5)
        ear.channel = call[:16]
        ear.listens = anyio.Event()
        async with following(http, call) as late, anyio.create_task_group() as listeners:
            listeners.start_soon(ear.listen, http)
            events = await ear.until_end(call)
            await answered.wait()
            assert text_of(events) == content_of(answers[0])
            listeners.cancel_scope.cancel()
            whole = await client.open_stream(text=BEFORE + content_of(answers[0]))
            for stream in (first, late):
                await stream.until(lambda s: s["received_tokens"] == whole.received_tokens)
            await client.delete_stream(whole.id)


async def run_followed(http: httpx.AsyncClient, call: str) -> str:
    async with following(http, call) as one, following(http, call) as other:
        content = content_of(await ask(http, CHATS, LONG, call))
        begun = len(BEFORE) // 8
        for stream in (one, other):
            await stream.until(lambda state: state["received_tokens"] > begun + 20)
    return content


async def test_a_stream_keeps_what_a_call_has_written_that_fails(
    http: httpx.AsyncClient, client: EngineClient
) -> None:
    call = new_call()
    async with following(http, call) as stream:
        begun = (await stream.state())["received_tokens"]
        async with anyio.create_task_group() as group:
            group.start_soon(ask, http, CHATS, {**LONG, "max_tokens": 4000}, call)
            await stream.until(lambda state: state["received_tokens"] > begun + 5)
            group.cancel_scope.cancel()
        with anyio.fail_after(30):
            while (await in_flight(http))["heard_calls"]:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        assert (await stream.state())["received_tokens"] > begun + 5
        # The stream goes on; its next call is another one.
        again = new_call()
        assert (await stream.append(call=again)).status_code == 400
        assert (await stream.append(start=len(BEFORE), call=again)).status_code == 200
        content = content_of(await ask(http, CHATS, CHAT | {"separate_reasoning": False}, again))
        whole = await client.open_stream(text=BEFORE + content)
        await stream.until(lambda state: state["received_tokens"] == whole.received_tokens)
        await client.delete_stream(whole.id)


async def test_a_stream_may_end_while_it_follows(http: httpx.AsyncClient) -> None:
    call, body = new_call(), {**LONG, "max_tokens": 300}
    plain, answers = await ask(http, CHATS, body), list[str]()

    async def run() -> None:
        answers.append(await ask(http, CHATS, body, call))

    async with anyio.create_task_group() as group, following(http, call) as stream:
        begun = (await stream.state())["received_tokens"]
        group.start_soon(run)
        await stream.until(lambda state: state["received_tokens"] > begun + 5)
    assert answers == [plain]


async def test_a_call_that_never_comes_leaves_nothing(http: httpx.AsyncClient) -> None:
    opened = await http.post("/prompt_streams", json={"text": BEFORE, "ttl_seconds": 0.5})
    stream = Followed(http, opened.json()["id"], new_call())
    assert (await stream.append(call=stream.call)).status_code == 200
    assert (await in_flight(http))["awaited_calls"] == 1
    await stream.until(lambda state: "error" in state)
    assert not (await in_flight(http))["awaited_calls"]
    async with following(http, new_call()) as stream:
        # Nothing was written, so that text can follow without a place.
        assert (await stream.append(text="Walk.")).status_code == 200
        assert not (await in_flight(http))["awaited_calls"]


async def test_a_request_that_is_refused_leaves_a_stream_that_goes_on_following(
    http: httpx.AsyncClient, client: EngineClient
) -> None:
    call = new_call()
    async with following(http, call) as stream:
        refused = {"text": BEFORE, "prompt_stream_id": stream.id, "sampling_params": {"top_p": 9}}
        assert (await http.post("/generate", json=refused)).status_code == 400
        content = content_of(await ask(http, CHATS, LONG, call))
        whole = await client.open_stream(text=BEFORE + content)
        await stream.until(lambda state: state["received_tokens"] == whole.received_tokens)
        await client.delete_stream(whole.id)
