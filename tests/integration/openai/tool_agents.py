"""Agents with tools in loops of their own, and a watch on the links to their next requests."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.integration.openai.programs import BODY, SETTINGS
from tests.integration.scripted import LinkWatch

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


class Watch(LinkWatch):
    """Counts the tools that have run."""

    _tools = 0

    async def linked(self) -> None:
        """Wait until there have been as many links as tools have run."""
        self._tools += 1
        await self.until(lambda: len(self.opened) >= self._tools)

    async def prefilled(self, tokens: int = 0, links: int = 0) -> int:
        """Wait until the own link of this tool has KV for nearly all that is certain."""
        self._tools += 1
        return await super().prefilled(tokens, links or self._tools)


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
