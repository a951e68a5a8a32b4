"""Test that requests which a server takes as they are get their answers in every other form."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal

import httpx
import openai
import pytest

from flashmoa import openai_http
from flashmoa.linking.calls import CallObserver, CallResult
from flashmoa.openai import run
from flashmoa.openai_http import observe_completions
from tests.unit.openai import fake_server
from tests.unit.openai.fake_server import (
    TEXT,
    FakeServer,
    both_clients,
    chunk,
    chunks,
    in_pieces,
    stream,
    whole,
)

pytestmark = [pytest.mark.anyio, both_clients]
MESSAGES: Any = [{"role": "user", "content": "Go."}]
REFUSAL = {"object": "error", "message": "not like this", "code": 400}
TOOL = {"type": "function", "function": {"name": "look"}}
How = Literal["plain", "run"]
Create = Callable[..., Any]


@asynccontextmanager
async def calls(server: FakeServer, how: How) -> AsyncGenerator[Create]:
    """Yield a function that asks for an answer, in a run or not."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(server.client())
        if how == "run" and server.is_blocking:
            stack.enter_context(run("forms"))
        elif how == "run":
            await stack.enter_async_context(run("forms"))
        create: Any = client.chat.completions.create

        async def ask(extra: Mapping[str, Any] = {}, **more: Any) -> Any:
            return await create(model="m", messages=MESSAGES, extra_body=dict(extra), **more)

        yield ask


def refuse_streams(status: int) -> Callable[[dict[str, Any]], httpx.Response]:
    return lambda body: httpx.Response(status, json=REFUSAL) if body.get("stream") else whole()


@pytest.mark.parametrize("status", [400, 405, 406, 415, 422, 501])
async def test_a_server_that_refuses_streams_is_asked_once_for_one(
    server: FakeServer, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    server.chat = refuse_streams(status)
    async with calls(server, "run") as create:
        texts = [(await create()).choices[0].message.content for _ in range(3)]
    assert texts == [TEXT] * 3
    assert [bool(body.get("stream")) for body in server.chats()] == [True, False, False, False]
    assert caplog.text.count("refuses requests with") == 1


async def test_requests_with_other_fields_or_models_are_still_sent_as_streams(
    server: FakeServer,
) -> None:
    def chat(body: dict[str, Any]) -> httpx.Response:
        odd = body.get("stream") and "seed" in body
        return httpx.Response(400, json=REFUSAL) if odd else stream(chunks())

    server.chat = chat
    async with calls(server, "run") as create:
        for options in ({"seed": 1}, {"seed": 2}, {}, {"extra": {"seed": 1, "other": 2}}):
            await create(**options)
    streamed = [bool(body.get("stream")) for body in server.chats()]
    assert streamed == [True, False, False, True, True, False]


ERRORS: list[Any] = [
    REFUSAL, {**REFUSAL, "code": None}, {"message": "no streams", "code": "unsupported_value"},
    {"message": "no streams", "code": "500"}, "no streams",
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=str)
async def test_an_error_event_in_place_of_an_answer_is_a_refusal(
    server: FakeServer, error: Any
) -> None:
    server.chat = lambda body: stream([{"error": error}]) if body.get("stream") else whole()
    async with calls(server, "run") as create:
        for _ in range(2):
            assert (await create()).choices[0].message.content == TEXT
    assert [body.get("stream") for body in server.chats()] == [True, None, None]


@pytest.mark.parametrize("before", [[], [chunk({"content": "The "})]], ids=["first", "after text"])
async def test_any_other_error_event_is_the_callers(
    server: FakeServer, before: list[dict[str, Any]]
) -> None:
    """The text of an answer that has begun is not paid for twice."""
    error = {**REFUSAL, "code": 400 if before else 503}
    server.chat = lambda body: stream([*before, {"error": error}])
    async with calls(server, "run") as create:
        with pytest.raises(openai.APIStatusError) as raised:
            await create()
    assert raised.value.status_code == error["code"] and len(server.chats()) == 1


@pytest.mark.parametrize("status", [400, 200])
async def test_a_refused_form_is_tried_again_after_a_while(
    server: FakeServer, status: int, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    server.chat = lambda body: httpx.Response(status) if body.get("stream") else whole()
    async with calls(server, "run") as create:
        for seconds in (300.0, 0.0, 0.0):
            monkeypatch.setattr(openai_http, "_REFUSED_SECONDS", seconds)
            await create()
            await create()
            openai_http._refused.update(dict.fromkeys(openai_http._refused, 0.0))
    first, later = [True, None, None], [True, None] * 4
    assert [body.get("stream") for body in server.chats()] == [*first, *later]
    assert len(caplog.records) == 1


async def test_a_form_is_not_to_blame_if_the_request_fails_as_it_was(server: FakeServer) -> None:
    server.chat = lambda body: (
        stream([]) if body.get("stream") else httpx.Response(503, json=REFUSAL)
    )
    async with calls(server, "run") as create:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError):
                await create()
    assert [body.get("stream") for body in server.chats()] == [True, None] * 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 413, 422, 429, 500, 503])
async def test_a_refusal_of_the_request_itself_is_the_callers(
    server: FakeServer, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    server.chat = lambda _: httpx.Response(status, json=REFUSAL)
    errors: list[Any] = []
    ways: list[How] = ["plain", "run"]
    for how in ways:
        async with calls(server, how) as create:
            with pytest.raises(openai.APIStatusError) as raised:
                await create()
        error = raised.value
        errors.append((type(error), error.status_code, error.body, error.request.content))
    assert errors == errors[:1] * 2
    assert len(server.chats()) == (3 if status in (400, 422) else 2)
    assert "refuses requests with" not in caplog.text


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True, "top_logprobs": 2}, {"prompt_logprobs": 0}, {"return_token_ids": True},
        {"return_meta_info": True}, {"return_hidden_states": "last"}, {"n": 2},
        {"audio": {"voice": "v"}}, {"modalities": ["text", "audio"]}, {"stream_options": [1]},
        {"stream_options": {"include_usage": True}},
    ],
    ids=str,
)  # fmt: skip
async def test_what_streams_do_not_carry_is_not_asked_for_as_a_stream(
    server: FakeServer, fields: dict[str, Any]
) -> None:
    async with calls(server, "run") as create:
        await create(fields)
    assert [body.get("stream") for body in server.chats()] == [None]


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": False}, {"return_token_ids": None}, {"modalities": ["text"]}, {"audio": None},
        {"stream_options": None},
    ],
    ids=str,
)  # fmt: skip
async def test_what_is_not_asked_for_hinders_no_stream(
    server: FakeServer, fields: dict[str, Any]
) -> None:
    async with calls(server, "run") as create:
        await create(fields)
    assert [body.get("stream") for body in server.chats()] == [True]


class Linked(CallObserver):
    """A call that is to find its prompt in a stream of a server."""

    prompt_stream_id = "s"
    expected_output_tokens = 7

    def __init__(self) -> None:
        self.results: list[CallResult] = []

    def on_finish(self, result: CallResult) -> None:
        self.results.append(result)


OWN = {"prompt_stream_id": "s", "expected_output_tokens": 7}


@pytest.mark.parametrize("asked", [{}, {"stream": True}, {"tools": [TOOL]}], ids=str)
async def test_a_server_that_refuses_our_own_fields_gets_them_once(
    server: FakeServer, asked: dict[str, Any]
) -> None:
    def chat(body: dict[str, Any]) -> httpx.Response:
        if OWN.keys() & body.keys():
            return httpx.Response(400, json=REFUSAL)
        return stream(chunks()) if body.get("stream") else whole()

    server.chat = chat
    observer, texts = Linked(), list[str]()
    async with openai.AsyncOpenAI(base_url="http://engine:30000/v1", api_key="x") as client:
        observe_completions(client._client, lambda: lambda _request, _body: observer)
        for _ in range(3):
            create: Any = client.chat.completions.create
            answer: Any = await create(model="m", messages=MESSAGES, **asked)
            if asked.get("stream"):
                deltas = [event.choices[0].delta.content or "" async for event in answer]
                texts.append("".join(deltas))
            else:
                texts.append(answer.choices[0].message.content)
    assert texts == [TEXT] * 3 and len(observer.results) == 3
    assert [OWN.keys() <= body.keys() for body in server.chats()] == [True, False, False, False]
    assert server.chats()[1] == {"model": "m", "messages": MESSAGES, **asked}


def lines(*events: Any) -> bytes:
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(f"data: {text}\n\n" for text in texts).encode()


def chunk_of(choice: Any, **more: Any) -> dict[str, Any]:
    return {**chunk({}), "choices": [choice], **more}


TEXTS = fake_server.WORDS
WORDS = chunks()[:-1]
STOP = chunks()[-1]
USUAL = lines(*WORDS, STOP, "[DONE]")
# Streams that only an intolerant reader does not read.
READABLE = {
    "usual": USUAL,
    "comments": b": ping\n\n" + USUAL.replace(b"\n\ndata", b"\n\n: ping\n\ndata"),
    "CRLF": USUAL.replace(b"\n", b"\r\n"),
    "CR": USUAL.replace(b"\n", b"\r"),
    "no space": USUAL.replace(b"data: ", b"data:"),
    "BOM": b"\xef\xbb\xbf" + USUAL,
    "names and ids": USUAL.replace(b"data: ", b"event: x\nid: 3\nretry: 5\ndata: "),
    "two lines": USUAL.replace(b', "choices"', b',\ndata: "choices"'),
    "empty events": b"data:\n\n" + USUAL.replace(b"\n\n", b"\n\ndata: \n\n"),
    "empty lines": USUAL.replace(b"\n\n", b"\n\n\n\n"),
    "no done": lines(*WORDS, STOP),
    "unended done": USUAL.removesuffix(b"\n"),
    "unended stop": lines(*WORDS, STOP).removesuffix(b"\n"),
    "null delta": lines(*WORDS, chunk_of({"index": 0, "delta": None, "finish_reason": "stop"})),
    "no delta": lines(*WORDS, chunk_of({"index": 0, "finish_reason": "stop"})),
    "no index": lines(*WORDS, chunk_of({"delta": {}, "finish_reason": "stop"})),
    "null index": lines(*WORDS, chunk_of({"index": None, "delta": {}, "finish_reason": "stop"})),
    "null content": lines(chunk({"content": None}), *WORDS, chunk({"content": None}, "stop")),
    "null choices": lines({**chunk({}), "choices": None}, *WORDS, STOP),
    "null choice": lines({**chunk({}), "choices": [None]}, *WORDS, STOP),
    "pings": lines({}, *WORDS, {}, STOP, {}, "[DONE]"),
    "roles": lines(*(chunk({"role": "assistant", "content": word}) for word in TEXTS), STOP),
    "null roles": lines(chunk({"role": "assistant"}), chunk({"role": None}), *WORDS, STOP),
    "empty reasons": lines(*(chunk({"content": word}, "") for word in TEXTS), STOP),
    "null tool calls": lines(chunk({"tool_calls": None}), *WORDS, STOP),
    "null error": lines(*({**event, "error": None} for event in [*WORDS, STOP])),
    "other last id": lines(*WORDS, STOP, {**STOP, "id": "", "model": "", "choices": []}),
    "null usage": lines(*WORDS, STOP, {"choices": [], "usage": None}),
}  # fmt: skip
# Streams of which no reader can make the answer.
UNUSABLE = {
    "not JSON": lines(*WORDS[:2], "<html>", *WORDS[2:], STOP),
    "deep": lines(*WORDS[:2], "[" * 100_000, *WORDS[2:], STOP),
    "no object": lines(*WORDS[:2], "[1]", *WORDS[2:], STOP),
    "no choice": lines({}, "[DONE]"),
    "single line ends": USUAL.replace(b"\n\n", b"\n"),
    "text as delta": lines(chunk_of({"index": 0, "delta": "The"}), STOP),
    "message": lines(chunk_of({"index": 0, "message": {"content": TEXT}, "finish_reason": "stop"})),
    "parts": lines(chunk({"content": [{"type": "text", "text": "The"}]}), STOP),
    "text and parts": lines(WORDS[0], chunk({"content": [{"type": "text", "text": "The"}]})),
    "index is a text": lines(chunk_of({"index": "a", "delta": {}}), STOP),
    "empty": b"",
    "no reason": lines(*WORDS),
    "no reason but done": lines(WORDS[0], "[DONE]"),
    "own field differs": lines(*({**event, "own": n} for n, event in enumerate([*WORDS, STOP]))),
}


@pytest.mark.parametrize("name", READABLE)
async def test_an_odd_stream_is_read_as_the_answer_that_it_is(
    server: FakeServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.chat = lambda body: in_pieces([READABLE[name]]) if body.get("stream") else whole()
    async with calls(server, "plain") as create:
        plain = (await create()).to_dict()
    async with calls(server, "run") as create:
        answer = (await create()).to_dict()
    assert len(server.chats()) == 2 and not caplog.records
    if name == "null tool calls":  # It is null in these chunks, but the whole answer has none.
        del answer["choices"][0]["message"]["tool_calls"]
    assert answer == plain


@pytest.mark.parametrize("name", UNUSABLE)
async def test_a_server_of_unusable_streams_is_asked_once_for_one(
    server: FakeServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.chat = lambda body: in_pieces([UNUSABLE[name]]) if body.get("stream") else whole()
    async with calls(server, "run") as create:
        for options in ({}, {"seed": 1}, {}, {"seed": 1}, {"temperature": 0}):
            assert (await create(**options)).choices[0].message.content == TEXT
    assert [bool(body.get("stream")) for body in server.chats()] == [True, *[False] * 5]
    assert caplog.text.count("make no answers") == 1


@pytest.mark.parametrize(
    "kind", ["text/plain; charset=utf-8", "application/octet-stream", "application/x-ndjson"]
)
async def test_a_stream_that_says_to_be_something_else_is_not_the_answer(
    server: FakeServer, kind: str
) -> None:
    read: list[bytes] = []
    pieces = (read.append(piece) or piece for piece in [USUAL])
    server.chat = lambda body: in_pieces(pieces, kind) if body.get("stream") else whole()
    async with calls(server, "run") as create:
        for _ in range(2):
            assert (await create()).choices[0].message.content == TEXT
    assert [body.get("stream") for body in server.chats()] == [True, None, None]
    # The end of what cannot be the answer is not waited for.
    assert bool(read) == ("json" in kind)


@pytest.mark.parametrize(
    "body", [{"error": REFUSAL}, chunk({"content": "The"}, "stop"), {"choices": []}], ids=str
)
async def test_json_that_is_no_whole_answer_is_not_the_answer(
    server: FakeServer, body: dict[str, Any]
) -> None:
    server.chat = lambda asked: httpx.Response(200, json=body) if asked.get("stream") else whole()
    async with calls(server, "run") as create:
        for _ in range(2):
            assert (await create()).choices[0].message.content == TEXT
    assert [body.get("stream") for body in server.chats()] == [True, None, None]


async def test_listeners_are_told_of_the_text_of_the_whole_answer(server: FakeServer) -> None:
    class Listening(CallObserver):
        def on_text(self, text: str) -> None:
            told.append(text)

        def on_finish(self, result: CallResult) -> None:
            told.append(result)

        def on_failure(self, error: BaseException) -> None:
            told.append(error)

    told: list[Any] = []
    server.chat = lambda body: (
        in_pieces([UNUSABLE["no reason but done"]]) if body.get("stream") else whole()
    )
    async with httpx.AsyncClient() as http:
        observe_completions(http, lambda: lambda _request, _body: Listening())
        body = {"model": "m", "messages": MESSAGES}
        await http.post("http://engine:30000/v1/chat/completions", json=body)
    assert told == ["The ", CallResult(TEXT, None, "stop", is_forwarded=True)]


async def test_what_was_refused_last_is_remembered(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_http, "_MAX_REFUSED", 2)
    server.chat = refuse_streams(400)
    async with calls(server, "run") as create:
        for seed in (1, 2, 3, 3):
            await create({f"field {seed}": 0})
            openai_http._refused.update(dict.fromkeys(openai_http._refused, 0.0))
    fields = [sorted(form[1])[0] for form in list(openai_http._refused)]
    assert fields == ["field 2", "field 3"]


async def test_content_types_have_no_case(server: FakeServer) -> None:
    server.chat = lambda _: in_pieces([USUAL], "Text/Event-Stream")
    async with calls(server, "run") as create:
        assert (await create()).choices[0].message.content == TEXT
    assert [body.get("stream") for body in server.chats()] == [True]


async def outcome(create: Create) -> list[Any]:
    """Return the chunks of a streamed answer, and the error that ended it, if one did."""
    found: list[Any] = []
    try:
        found += [event.to_dict() async for event in await create(stream=True)]
    except Exception as error:
        found += [type(error), str(error)]
    return found


@pytest.mark.parametrize("name", [*READABLE, *UNUSABLE])
async def test_an_odd_stream_that_the_caller_asked_for_passes_as_it_is(
    server: FakeServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.chat = lambda _: in_pieces([{**READABLE, **UNUSABLE}[name]])
    async with calls(server, "plain") as create:
        plain = await outcome(create)
    async with calls(server, "run") as create:
        assert await outcome(create) == plain
    assert len(server.chats()) == 2 and not caplog.records
