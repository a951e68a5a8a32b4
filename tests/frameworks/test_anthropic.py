"""A program with Anthropic's client finds its prompts on an engine that holds them over tools.

The engine's random model calls ``weather``.
"""

from __future__ import annotations

import random

import anthropic
import anyio
import pytest
from anthropic.types import Message, MessageParam, ToolParam

from flashmoa.engine import EngineClient
from tests.frameworks.conftest import URLS

WEATHER: ToolParam = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_anthropic_program_finds_its_prompt_after_its_tools(
    guide: str, stream: bool
) -> None:
    dice, words = random.Random(stream), guide.split()
    async with (
        EngineClient(URLS[0]) as engine,
        anthropic.AsyncAnthropic(base_url=URLS[0], api_key="none", max_retries=0) as client,
    ):
        await engine.flush_cache()
        messages: list[MessageParam] = [
            {"role": "user", "content": " ".join(dice.choices(words, k=400))}
        ]
        answer = await ask(client, messages, stream=stream)
        uses = [block for block in answer.content if block.type == "tool_use"]
        with anyio.fail_after(20):
            while not (await engine.info()).kv[0].pinned_streams:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        for _ in range(3):
            await engine.prefill_only(text=" ".join(dice.choices(words, k=1200)))
        messages += [
            {"role": "assistant", "content": answer.content},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": use.id, "content": "It rains."}
                    for use in uses
                ],
            },
        ]
        after = await ask(client, messages, stream=stream, tokens=8)
        assert after.usage.input_tokens <= 30 * len(uses)
        assert not (await engine.info()).prompt_streams


async def ask(
    client: anthropic.AsyncAnthropic,
    messages: list[MessageParam],
    *,
    stream: bool,
    tokens: int | None = None,
) -> Message:
    """Return an answer; without ``tokens``, one that calls a tool. A random model may never end."""
    for _ in range(1 if tokens else 50):
        request = {
            "model": "m",
            "max_tokens": tokens or 400,
            "messages": messages,
            "tools": [WEATHER],
            "tool_choice": {"type": "auto" if tokens else "any"},
            "extra_body": {"temperature": 1.0},
        }
        if stream:
            async with client.messages.stream(**request) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(**request)
        if tokens or answer.stop_reason == "tool_use":
            return answer
    raise AssertionError("The model has called no tool.")
