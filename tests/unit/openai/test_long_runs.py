"""Test that calls without end, within one run or without one, keep nothing."""

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest

from flashmoa.link import learned_runs
from flashmoa.openai import agent, run
from flashmoa.openai import runs as _runs
from tests.retention import few_or_many, kept_by
from tests.unit.events import warnings
from tests.unit.openai.fake_server import (
    TEXT,
    WORDS,
    FakeServer,
    ask,
    both_clients,
    chunk,
    serve,
    stream,
    whole,
)
from tests.waiting import until

LIMITS = [f"link.{name}.MAX_CALLS_AT_ONCE" for name in ("learned_runs", "learned_links")] + [
    "link.after_tools.MAX_CALLS_AT_ONCE", "_limits.MAX_REMEMBERED", "openai.runs._MAX_ENGINES",
    "observe.report.MAX_REMEMBERED",
]  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeServer:
    """A server, with limits that a few calls reach."""
    learned_runs._warn_of_size.cache_clear()
    monkeypatch.setattr(learned_runs, "MAX_RECORDED_BYTES", 20_000)
    for limit in LIMITS:
        monkeypatch.setattr(f"flashmoa.{limit}", 5)
    monkeypatch.setattr(_runs, "_programs", {})
    # Pydantic keeps the last thousands of short strings that it reads, such as the ids of calls.
    monkeypatch.setattr("flashmoa.engine.generation.parse_event", json.loads)
    server = serve(monkeypatch, same_ids=True)
    server.is_blocking = getattr(request, "param", False)
    return server


def call_tool(body: dict[str, Any]) -> httpx.Response:
    """Call a tool, unless its result is there."""
    if body["messages"][-1]["role"] == "tool":
        return stream([chunk({"content": "Done."}), chunk({}, "stop")])
    id_ = body["messages"][-1]["content"][:90]
    call = {"index": 0, "id": id_, "function": {"name": "look", "arguments": "{}"}}
    return whole(message={"role": "assistant", "content": None, "tool_calls": [call]})


@few_or_many
@both_clients
@pytest.mark.parametrize("ahead", [None, "nothing", "known", "text"])
async def test_calls_without_end_keep_nothing(
    server: FakeServer, caplog: pytest.LogCaptureFixture, ahead: Any, steps: int
) -> None:
    server.told, server.awaits_channels = lambda _: WORDS, False
    async with server.client() as client:

        async def step(number: int) -> None:
            server.forget()
            with agent(f"agent {number}"):
                await ask(client, f"{number}".ljust(100), stream=False)
            await ask(client, f"{number}, again".ljust(100))

        async with nullcontext() if ahead is None else run("endless", ahead=ahead):
            assert await kept_by(step, steps) < 1
    assert ["learned from" in each for each in warnings(caplog)] == [True] * bool(ahead)


@few_or_many
@pytest.mark.parametrize("comes", [True, False], ids=["comes", "never comes"])
async def test_requests_after_tools_keep_nothing(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, comes: bool, steps: int
) -> None:
    monkeypatch.setattr("flashmoa.link.after_tools.FASTEST_TOOL_SECONDS", 0)
    server.chat = call_tool
    async with server.client() as client, run("endless"):

        async def step(number: int) -> None:
            server.forget()
            messages: list[Any] = [{"role": "user", "content": f"{number}".ljust(100)}]
            tools = [{"type": "function", "function": {"name": "look"}}]
            asking: Callable[..., Any] = client.chat.completions.create
            answer = await asking(model="m", messages=messages, tools=tools)
            message = answer.choices[0].message.model_dump(exclude_none=True)
            messages += [message, {"role": "tool", "tool_call_id": f"{number}".ljust(90)[:90]}]
            messages[-1]["content"] = json.dumps({"found": number}).ljust(100)
            if comes:
                await asking(model="m", messages=messages, tools=tools)
            await until(lambda: len(asyncio.all_tasks()) < 40)

        assert await kept_by(step, steps) < 1


async def test_endless_failures_keep_nothing(server: FakeServer) -> None:
    server.chat = lambda _: httpx.Response(400, json={"error": {"message": "no"}})
    async with server.client() as client, run("endless"):

        async def step(number: int) -> None:
            server.forget()
            with pytest.raises(Exception, match="no"):
                await ask(client, f"{number}".ljust(100))

        assert await kept_by(step, 30) < 1


async def test_users_without_end_get_one_warning(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.chat = call_tool
    tools = [{"type": "function", "function": {"name": "look"}}]
    async with server.client() as client, run("users"):
        for number in range(10):
            with agent("asker"):
                user = {"x-user": f"{number}"}
                await ask(client, "Look.", tools=tools, extra_headers=user)
    (warning,) = warnings(caplog)
    assert "its run has sent more than 5 different sets of headers" in warning


@pytest.mark.slow
async def test_runs_in_several_threads_leave_nothing(server: FakeServer) -> None:
    client, answers = server.client(), set[str]()

    async def work() -> None:
        async with run("shared"):
            draft = await ask(client, "Write.".ljust(100))
            review = await ask(client, f"Review {draft.message.content}".ljust(100))
            answers.add(review.message.content)

    async def step(_number: int) -> None:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(anyio.to_thread.run_sync, asyncio.run, work())
        # A new event loop drops the connections of ended loops. So only its own connections are
        # left of a step, in whatever order the threads went.
        await anyio.to_thread.run_sync(asyncio.run, work())
        server.forget()

    assert await kept_by(step, 40) < 1
    assert answers == {TEXT}
