"""Test that what a program sends and reads is the same within runs, byte for byte."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

import anyio
import httpx
import pytest

from flashmoa._concurrency import finish
from flashmoa.engine.wire import CALL_HEADER, DYNAMO_HEADER, STREAM_HEADER, TOKENS_HEADER
from flashmoa.openai import AsyncOpenAI, OpenAI, agent, run
from flashmoa.openai.runs import RunContext
from tests.unit.openai.fake_server import TEXT, URL, WORDS, FakeServer, in_pieces

Ahead = Literal["nothing", "known", "text"]
Api = Literal["chat", "responses"]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {}}}
SCHEMA = {"name": "a", "schema": {"type": "object"}}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": [TOOL], "tool_choice": "auto"},
    "several": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "format": {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    "stop": {"stop": ["\n", "\u2028"], "max_tokens": 7, "temperature": 0.0},
    "usage": {"stream_options": {"include_usage": True}},
    "own": {"extra_body": {"top_k": 3, "chat_template_kwargs": {"a": None}}, "seed": 2**60},
    "salt": {"extra_body": {"cache_salt": "a", "prompt_stream_id": "mine"}, "user": "\U0001f98a"},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "instructions": {"instructions": "Be brief.", "temperature": 0.0},
    "tools": {"tools": [{"type": "function", "name": "look", "parameters": {}, "strict": None}]},
    "format": {"text": {"format": {"type": "json_object"}}},
    "stored": {"previous_response_id": "resp_0", "store": False},
    "own": {"extra_body": {"top_k": 3}, "max_output_tokens": 7, "include": []},
}
# Bodies that OpenAI's client would not write.
GO = b'{"role":"user" ,"content":"\\u0047o."}'
CONTENTS = {
    "spaces": b'{ "model":"m",\r\n\t"messages" : [%s] , "input":"Go."}\n' % GO,
    "escapes": b'{"messages":[%s],"user":"\\ud83d","input":"\\u0047","model":"m"}' % GO,
    "twice": b'{"model":"x","model":"m","messages":[],"input":"","temperature":1.0e0}',
}
OURS = {CALL_HEADER, DYNAMO_HEADER, STREAM_HEADER, TOKENS_HEADER}
SESSION = {"x-smg-routing-key", "x-dynamo-session-id", "x-dynamo-parent-session-id"}


def answer_chat(body: dict[str, Any]) -> httpx.Response:
    """Answer in a form that no JSON library would write in this way."""
    if not body.get("stream"):
        message = b'{"content":"%s" ,"role":"assistant","own":\t1.0e0}' % TEXT.encode()
        choice = b'{"finish_reason":"stop","message":%s,"index":0}' % message
        content = b'{ "choices":[%s],\r\n"object":"chat.completion","model":"m" }\n' % choice
        return httpx.Response(200, content=content, headers={"content-type": "application/json"})
    choices = [b'[{"delta":{"content":"%s"} ,"index":0}]' % word.encode() for word in WORDS]
    choices += [b"null", b'[{"finish_reason":"stop","delta":null}]']
    events = [b'data:{"choices": %s,"own":1.0e0}\r\n\r\n' % each for each in choices]
    return in_pieces([b": hello\n\n", *events[:2], b"".join(events[2:]), b"data: [DONE]\n\n"])


def answer_response(body: dict[str, Any]) -> httpx.Response:
    part = b'{"text":"%s","type" :"output_text","annotations":[]}' % TEXT.encode()
    item = b'{"type":"message","role":"assistant","id":"1","content":[%s]}' % part
    whole = b'{"status":"completed", "output":[%s],"object":"response"}\n' % item
    if not body.get("stream"):
        return httpx.Response(200, content=whole, headers={"content-type": "application/json"})
    words = [b'{"type":"response.output_text.delta", "delta":"%s"}' % x.encode() for x in WORDS]
    last = b'{"response":%s,"type":"response.completed"}' % whole.strip()
    return in_pieces([b"event: x\ndata: %s\n\n" % each for each in [*words, last]])


# Makes a call within a context, and returns the bytes that the program gets.
Call = Callable[[], Awaitable[bytes]]


def calls_of(client: Any, api: Api, *, is_stream: bool) -> dict[str, Call]:
    """Return calls that take the answer's bytes, by name, of either kind of clients."""
    create = client.chat.completions if api == "chat" else client.responses
    path = f"{URL}/v1/{'chat/completions' if api == 'chat' else 'responses'}"
    message = {"role": "user", "content": "Go.\u2028"}
    prompt: dict[str, Any] = {"messages": [message]} if api == "chat" else {"input": "Go."}
    is_blocking, streamed = isinstance(client, OpenAI), {"stream": True} if is_stream else {}

    async def typed(asked: Mapping[str, Any]) -> bytes:
        made = create.with_streaming_response.create(model="m", **prompt, **asked, **streamed)
        if is_blocking:
            with made as response:
                return b"".join(response.iter_bytes())
        async with made as response:
            return b"".join([piece async for piece in response.iter_bytes()])

    async def parsed(asked: Mapping[str, Any]) -> bytes:
        made = create.with_raw_response.create(model="m", **prompt, **asked)
        response: Any = made if is_blocking else await made
        return response.http_response.content

    async def raw(content: bytes) -> bytes:
        if is_stream:
            content = content[:1] + b'"stream" :true,' + content[1:]
        request = client._client.build_request("POST", path, content=content)
        if is_blocking:
            return client._client.send(request).content
        return (await client._client.send(request)).content

    calls: dict[str, Call] = {}
    for name, asked in (CHATS if api == "chat" else RESPONSES).items():
        calls[name] = partial(typed, asked)
        if not is_stream:
            calls[f"{name} parsed"] = partial(parsed, asked)
    return calls | {name: partial(raw, content) for name, content in CONTENTS.items()}


async def play(calls: dict[str, Call], pause: Callable[[], Awaitable[None]]) -> dict[str, bytes]:
    """Make each call as an agent of its own, after a pause."""
    got: dict[str, bytes] = {}
    for name, call in calls.items():
        if got:
            await pause()
        with agent(name):
            got[name] = await call()
    return got


@pytest.fixture
def answering(server: FakeServer) -> FakeServer:
    server.chat, server.response, server.told = answer_chat, answer_response, lambda _: WORDS
    server.awaits_channels = False
    return server


def take(server: FakeServer) -> tuple[list[bytes], list[httpx.Headers]]:
    """Return the bodies and headers of the requests for answers, and forget all requests."""
    taken = server.contents.copy(), server.headers("/chat/completions", "/responses")
    server.forget()
    return taken


def check_headers(outside: list[httpx.Headers], inside: list[httpx.Headers]) -> None:
    """Check that headers were added, and no others changed."""
    for before, now in zip(outside, inside, strict=True):
        added = now.keys() - before.keys()
        assert added <= {name.lower() for name in OURS} | SESSION
        assert dict(before) == {name: now[name] for name in before}


@asynccontextmanager
async def entered(run: RunContext, *, is_blocking: bool) -> AsyncGenerator[None]:
    if is_blocking:
        with run:
            yield
    else:
        async with run:
            yield


async def check(
    server: FakeServer, client: Any, api: Api, *, is_stream: bool, ahead: Ahead
) -> None:
    """Make all calls outside of runs and in two runs. With a blocking client, nothing suspends."""
    is_linked, is_blocking = False, isinstance(client, OpenAI)

    async def pause() -> None:
        deadline = time.monotonic() + 20
        while is_linked and not server.bodies("/prompt_streams"):
            assert time.monotonic() < deadline
            if is_blocking:
                time.sleep(0.002)  # noqa: ASYNC251 - no event loop runs here.
            else:
                await anyio.sleep(0.002)

    calls = calls_of(client, api, is_stream=is_stream)
    got = await play(calls, pause)
    sent, headers = take(server)
    assert len(sent) == len(calls)
    for number in range(2):
        is_linked = number == 1 and ahead != "nothing"
        name = f"bytes {api} {is_stream} {ahead} {is_blocking}"
        async with entered(run(name, ahead=ahead), is_blocking=is_blocking):
            assert await play(calls, pause) == got
        assert not is_linked or server.bodies("/prompt_streams")
        now, headers_now = take(server)
        assert now == sent
        check_headers(headers, headers_now)
        check_marks(headers_now, ahead, calls, is_linked=is_linked)


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("ahead", ["nothing", "known", "text"])
@pytest.mark.parametrize("is_blocking", [False, True], ids=["async", "blocking"])
def test_a_client_sends_and_gets_the_same_bytes(
    answering: FakeServer, api: Api, is_stream: bool, ahead: Ahead, is_blocking: bool
) -> None:
    if is_blocking:
        with OpenAI(base_url=URL, max_retries=0) as client:
            finish(check(answering, client, api, is_stream=is_stream, ahead=ahead))
        return

    async def check_async() -> None:
        async with AsyncOpenAI(base_url=URL, max_retries=0) as client:
            await check(answering, client, api, is_stream=is_stream, ahead=ahead)

    asyncio.run(check_async())


def check_marks(
    headers: list[httpx.Headers], ahead: Ahead, calls: Mapping[str, Call], *, is_linked: bool
) -> None:
    """Check which calls are marked, so that the test is about calls that are linked and heard."""
    heard = [name for name, each in zip(calls, headers, strict=True) if CALL_HEADER in each]
    wanted = list(calls) if ahead == "text" else []
    assert heard == [name for name in wanted if not name.startswith("several")]
    assert any(STREAM_HEADER in each for each in headers) == is_linked
