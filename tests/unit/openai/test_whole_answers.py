"""Test that whole answers are asked for as they were where a stream may have another text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from flashmoa import openai_whole
from flashmoa.linking.calls import CallObserver
from flashmoa.observe import Event, LinkWaits, Listener
from flashmoa.openai import agent, run
from flashmoa.openai_http import observe_completions
from tests.unit.engine.faulty_engine import PARSES_NOTHING
from tests.unit.openai.fake_server import (
    TEXT,
    URL,
    FakeServer,
    ask,
    both_clients,
    whole,
)

pytestmark = pytest.mark.anyio
SEPARATES = {**PARSES_NOTHING, "reasoning_parser": "qwen3"}
# Of SGLang before 0.5.18, of SGLang 0.5.18 to 0.5.22, and of another server.
OLD, OLDER, OTHER = {"model_path": "m"}, {"reasoning_parser": None}, [1]
TOOL = {"type": "function", "function": {"name": "look"}}


def streams(server: FakeServer) -> list[bool]:
    return [bool(body.get("stream")) for body in server.chats()]


@both_clients
@pytest.mark.parametrize(
    ("settings", "is_stream"),
    [
        ({"/model_info": PARSES_NOTHING}, True),
        ({"/model_info": SEPARATES}, False),
        ({"/model_info": OLD, "/server_info": PARSES_NOTHING}, True),
        ({"/model_info": OLDER, "/server_info": PARSES_NOTHING}, True),
        ({"/model_info": OLD, "/server_info": SEPARATES}, False),
        ({"/model_info": OLDER, "/server_info": SEPARATES}, False),
        ({"/server_info": PARSES_NOTHING}, True),
        ({"/model_info": OLDER}, False),
        ({"/model_info": {**PARSES_NOTHING, "disaggregation_mode": "prefill"}}, False),
        ({"/server_info": {"prefill": [PARSES_NOTHING], "decode": [PARSES_NOTHING]}}, False),
        ({"/model_info": OTHER, "/server_info": OTHER}, False),
        ({}, False),
    ],
    ids=str,
)
async def test_a_whole_answer_is_asked_for_as_a_stream_only_where_nothing_separates_reasoning(
    server: FakeServer, settings: dict[str, Any], is_stream: bool
) -> None:
    server.settings = settings
    async with server.client() as client, run(f"{settings}"):
        for _ in range(3):
            assert (await ask(client, "Go.")).message.content == TEXT
    assert streams(server) == [is_stream] * 3
    paths = [question.url.path for question in server.questions]
    assert len(paths) == len(set(paths)) and paths[0] == "/model_info"


@both_clients
@pytest.mark.parametrize(
    ("settings", "is_stream"), [(SEPARATES, True), (PARSES_NOTHING, True), (None, False)], ids=str
)
async def test_a_request_can_switch_the_parser_of_sglang_off(
    server: FakeServer, settings: Any, is_stream: bool
) -> None:
    server.settings = {"/model_info": settings} if settings else {}
    async with server.client() as client, run(f"off {settings}"):
        await ask(client, "Go.", extra_body={"separate_reasoning": False})
    assert streams(server) == [is_stream]


@both_clients
async def test_tools_of_a_system_message_count_like_those_of_the_request(
    server: FakeServer,
) -> None:
    messages: Any = [
        {"role": "system", "content": "x", "tools": [TOOL]},
        {"role": "user", "content": "Go."},
    ]
    async with server.client() as client, run("system tools"):
        await client.chat.completions.create(model="m", messages=messages)
    assert streams(server) == [False]


@both_clients
async def test_nothing_is_asked_for_a_stream_that_the_caller_wants(server: FakeServer) -> None:
    async with server.client() as client, run("streams"):
        answer = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Go."}], stream=True
        )
        assert [event async for event in answer]
    assert streams(server) == [True] and not server.questions


async def test_the_question_has_the_callers_key_and_leaves_its_client_alone(
    server: FakeServer,
) -> None:
    async def note(request: httpx.Request) -> None:
        seen.append(request.url.path)

    seen: list[str] = []
    headers = {"authorization": "Bearer k", "x-tenant": "t", "idempotency-key": "once"}
    async with httpx.AsyncClient(event_hooks={"request": [note]}, headers=headers) as http:
        observe_completions(http, lambda: lambda _request, _body: CallObserver())
        await http.post(f"{URL}/v1/chat/completions", json={"model": "m", "messages": []})
    (question,) = server.questions
    assert seen == ["/v1/chat/completions"]
    assert (question.headers["authorization"], question.headers["x-tenant"]) == ("Bearer k", "t")
    assert not question.headers.keys() & {"content-length", "content-type", "idempotency-key"}


class Blocking:
    async def run(self, function: Callable[[], Any]) -> Any:
        return function()


async def test_a_server_is_asked_again_after_a_minute_and_sooner_if_it_did_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, told = 0.0, list[bool]()
    request = httpx.Request("POST", f"{URL}/v1/chat/completions")
    client: Any = Blocking()

    def answer(*_: object) -> bool:
        if not told:
            raise httpx.ConnectError("it starts")
        return told.pop(0)

    async def at(seconds: float, *answers: bool) -> bool | None:
        nonlocal now, told
        now, told = seconds, [*answers]
        found = await openai_whole._separates_reasoning(client, request)
        assert not told
        return found

    monkeypatch.setattr(openai_whole, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(openai_whole, "_ask", answer)
    assert await at(0.0, False) is False
    assert await at(59.0) is False
    assert await at(61.0, True) is True
    assert await at(120.0) is True
    assert await at(122.0) is None
    assert await at(131.0) is None
    assert await at(133.0, False) is False


@pytest.mark.parametrize("separates", [True, None])
async def test_the_report_says_why_a_link_waits_for_a_whole_answer(
    server: FakeServer, separates: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.settings = {"/model_info": SEPARATES} if separates else {}
    written, read = ({"message": {"role": "assistant", "content": each}} for each in (TEXT, "Ok."))
    server.chat = lambda body: whole(**(read if TEXT in str(body) else written))
    opened = asyncio.Event()

    async def handle(_: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        await request.aread()
        if request.url.path == "/prompt_streams":
            opened.set()
        elif request.url.path.endswith("/completions") and b"write" in request.content:
            await opened.wait()
        return server.answer(request)

    async def play(listener: Listener) -> str:
        async with run(f"waits {separates}", listener=listener) as report:
            with agent("writer"):
                draft = (await ask(client, "write")).message.content
            with agent("reader"):
                await ask(client, f"read {draft}")
        return f"{report}"

    events: list[Event] = []
    async with server.client() as client:
        await play(lambda _: None)
        monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
        report = await play(events.append)
    (waits,) = [event for event in events if isinstance(event, LinkWaits)]
    reason = "its engine separates" if separates else "its server does not say"
    assert waits.reason.startswith(reason)
    assert waits.reason in " ".join(report.split())
