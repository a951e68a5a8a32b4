"""Agents whose tools run: their own next request is prefilled meanwhile, and answered the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import openai
import pytest

from flashmoa.engine import EngineClient
from flashmoa.linking import own_turn
from flashmoa.observe import CallStarted, Event, LinkClosed, LinkOpened
from flashmoa.observe.calls import calls
from flashmoa.openai import run
from tests.integration.openai.programs import (
    BODY,
    SETTINGS,
    Clients,
    ask,
    closed,
    play_linked,
    statuses,
)
from tests.integration.scripted import Answer, script
from tests.integration.support import LAG, wait_until_idle, wait_until_prefilled

pytestmark = pytest.mark.anyio

TASK = "Plan three days in Nepal for two people."
# How many tokens may be left for a request of which all but a short result was known.
FEW = LAG + 64
LOOK = ("look", {"place": "lake"})
NEXT = [["look()"]]

Tool = Callable[[str, dict[str, Any]], Awaitable[str]]


def offer(*names: str) -> list[dict[str, Any]]:
    """Return tools as a request offers them."""
    parameters = {
        "type": "object",
        "properties": {"place": {"type": "boolean"}},
        "required": ["place"],
    }
    functions = [{"name": name, "description": "", "parameters": parameters} for name in names]
    return [{"type": "function", "function": function} for function in functions]


def call_until(results: int, answer: Answer) -> Callable[[dict[str, Any]], Answer | None]:
    """Script an agent with tools: it calls them until it has that many results."""

    def answer_to(request: dict[str, Any]) -> Answer | None:
        done = sum(message["role"] == "tool" for message in request["messages"])
        return answer if request.get("tools") and done < results else None

    return answer_to


class Watch:
    """Lets the tools of a linked run wait for the links to what their agents ask next."""

    def __init__(self, engine: EngineClient) -> None:
        self.events: list[Event] = []
        self.engine = engine

    @property
    def own_links(self) -> list[LinkOpened]:
        opened = [event for event in self.events if isinstance(event, LinkOpened)]
        return [event for event in opened if event.upstream and event.upstream[0].endswith(")")]

    def reasons(self) -> list[str]:
        """Return why the links to what agents ask after their tools were closed."""
        ids = [opened.stream_id for opened in self.own_links]
        ended = [event for event in self.events if isinstance(event, LinkClosed)]
        return [event.reason for event in ended if event.stream_id in ids]

    async def until(self, is_so: Callable[[], bool]) -> None:
        with anyio.fail_after(20):
            while not is_so():  # noqa: ASYNC110
                await anyio.sleep(0.002)

    async def prefilled(self, links: int = 1) -> None:
        """Wait until the latest own link has KV for nearly all that is certain."""
        await self.until(lambda: len(self.own_links) >= links)
        stream_id = self.own_links[-1].stream_id
        assert stream_id is not None
        state = await self.engine.stream_state(stream_id)
        await wait_until_prefilled(self.engine, stream_id, state.received_tokens - LAG)


async def agent(
    client: openai.AsyncOpenAI,
    system: str,
    task: str,
    tool: Tool,
    *,
    stream: bool = False,
    **more: Any,
) -> str:
    """Ask until the answer calls no tools, and return it; the tools of an answer run at once."""
    messages: list[Any] = [
        {"role": "system", "content": system},
        {"role": "user", "content": task},
    ]
    request: dict[str, Any] = {**SETTINGS, "tools": offer("look", "walk"), **more}
    extra = {"extra_body": more.get("extra_body", BODY)}
    while True:
        asked = {**request, **extra, "messages": messages}
        if stream:
            message = await _streamed(client, asked)
        else:
            answer = await client.chat.completions.create(**asked)
            message = answer.choices[0].message
        messages = [*messages, message.to_dict()]
        if not message.tool_calls:
            return message.content or ""
        functions = [call.function for call in message.tool_calls]
        results = await asyncio.gather(
            *[tool(each.name, json.loads(each.arguments)) for each in functions]
        )
        for call, result in zip(message.tool_calls, results, strict=True):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        # The tools of a forced call are not forced again.
        request.pop("tool_choice", None)


async def _streamed(client: openai.AsyncOpenAI, request: dict[str, Any]) -> Any:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    state: Any = openai.lib.streaming.chat.ChatCompletionStreamState()
    async for chunk in await client.chat.completions.create(**request, **options):
        state.handle_chunk(chunk)
    message = state.current_completion_snapshot.choices[0].message
    for call in message.tool_calls or ():
        call.index = None
    return message


async def fine(name: str, arguments: dict[str, Any]) -> str:
    return f"A fine {arguments.get('place')}."


async def test_a_request_after_a_tool_was_prefilled_while_the_tool_ran(
    clients: Clients,
    client: EngineClient,
    guide: str,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
) -> None:
    script(monkeypatch, call_until(2, LOOK))

    async def program(tool: Tool) -> list[str]:
        answer = await agent(clients.first, guide[:3000], TASK, tool, stream=stream)
        return [answer, await ask(clients.second, guide, f"Check:\n{answer}")]

    unlinked = await program(fine)
    for is_first in (True, False):
        watch = Watch(client)

        async def look(name: str, arguments: dict[str, Any]) -> str:
            await (watch.prefilled() if is_first else watch.linked())  # noqa: B023
            return await fine(name, arguments)

        await client.flush_cache()
        assert await play_linked(f"look {stream}", partial(program, look), watch.events) == unlinked
        assert statuses(watch.events) == [None, "hit", "hit", None if is_first else "hit"]
        late = [call.usage and call.usage.late_tokens for call in calls(watch.events)[1:3]]
        assert all(tokens is not None and tokens < FEW for tokens in late)
        # In the second run the results are expected to be those of the first.
        assert watch.reasons() == (["used", "used"] if is_first else [])


async def test_other_calls_and_results_than_before_are_linked_too(
    clients: Clients, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def program(tool: Tool) -> str:
        return await agent(clients.first, "You look.", TASK, tool)

    for place in ("lake", "hill", "hill"):
        script(monkeypatch, call_until(1, ("look", {"place": place})))
        watch = Watch(client)

        async def look(name: str, arguments: dict[str, Any]) -> str:
            if place == "lake" or not watch.is_again:  # noqa: B023
                await watch.prefilled()  # noqa: B023
            return await fine(name, arguments)

        assert await play_linked("other", partial(program, look), watch.events) == await program(
            fine
        )
        assert statuses(watch.events) == [None, "hit"]
