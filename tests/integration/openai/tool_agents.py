"""Agents with tools in loops of their own, and a watch on the links to their next requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import openai
from openai.lib.streaming.chat import ChatCompletionStreamState

from flashmoa.engine import EngineClient
from flashmoa.observe import Event, LinkClosed, LinkOpened
from tests.integration.openai.programs import BODY, SETTINGS
from tests.integration.support import LAG, wait_until_prefilled

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


class Watch:
    """Lets the tools of a linked run wait for the links to their agents' next requests."""

    def __init__(self, engine: EngineClient) -> None:
        self.events: list[Event] = []
        self.engine = engine

        self._tools = 0

    @property
    def opened(self) -> list[LinkOpened]:
        return [event for event in self.events if isinstance(event, LinkOpened)]

    @property
    def own_links(self) -> list[LinkOpened]:
        """The links to requests after tools whose results are not expected."""
        return [event for event in self.opened if event.upstream[:1] in (("look()",), ("walk()",))]

    def reasons(self, links: list[LinkOpened] | None = None) -> list[str]:
        """Return why links were closed; by default, why ``own_links`` were closed."""
        ids = [link.stream_id for link in (self.own_links if links is None else links)]
        ended = [event for event in self.events if isinstance(event, LinkClosed)]
        return [event.reason for event in ended if event.stream_id in ids]

    async def until(self, is_so: Callable[[], bool]) -> None:
        with anyio.fail_after(20):
            while not is_so():  # noqa: ASYNC110
                await anyio.sleep(0.002)

    async def linked(self) -> None:
        """Wait until there have been as many links as tools have run."""
        self._tools += 1
        await self.until(lambda: len(self.opened) >= self._tools)

    async def prefilled(self) -> None:
        """Wait until the own link of this tool has KV for nearly all that is certain."""
        self._tools += 1
        await self.until(lambda: len(self.own_links) >= self._tools)
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
    state: Any = ChatCompletionStreamState()
    async for chunk in await client.chat.completions.create(**request, **options):
        state.handle_chunk(chunk)
    message = state.current_completion_snapshot.choices[0].message
    for call in message.tool_calls or ():
        call.index = None
    return message


async def fine(name: str, arguments: dict[str, Any]) -> str:
    """Return what the tools find."""
    return f"A fine {arguments.get('place')}."


async def look_when_linked(watch: Watch, name: str, arguments: dict[str, Any]) -> str:
    await watch.linked()
    return await fine(name, arguments)


async def look_when_prefilled(watch: Watch, name: str, arguments: dict[str, Any]) -> str:
    await watch.prefilled()
    return await fine(name, arguments)
