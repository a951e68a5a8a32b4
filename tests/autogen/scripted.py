"""A tiny random model says nothing of use: what it computes is real, what it says is scripted."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from openai.resources.chat.completions import AsyncCompletions
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageToolCall

FunctionCall = tuple[str, dict[str, Any]]
# From a request: ``None`` for the engine's own answer, text, a function's name and arguments, or
# several of these, with text before them where there is any (not for streamed answers).
Script = Callable[[dict[str, Any]], str | FunctionCall | list[str | FunctionCall] | None]


def script(monkeypatch: pytest.MonkeyPatch, said: Script) -> None:
    """From here on, answers of engines are replaced once they have been computed."""
    real = AsyncCompletions.create

    async def create(self: AsyncCompletions, **request: Any) -> Any:
        answer = said(request)
        result: Any = await real(self, **request)  # type: ignore[call-overload]
        if answer is None:
            return result
        if request.get("stream") and not isinstance(answer, list):
            return _replaced(result, answer)
        message = result.choices[0].message
        if isinstance(answer, str):
            message.content = answer
        else:
            parts = answer if isinstance(answer, list) else [answer]
            message.content = next((one for one in parts if isinstance(one, str)), None)
            message.tool_calls = [
                ChatCompletionMessageToolCall.model_validate(_call(*one, number))
                for number, one in enumerate(parts, 1)
                if not isinstance(one, str)
            ]
            result.choices[0].finish_reason = "tool_calls"
        return result

    monkeypatch.setattr(AsyncCompletions, "create", create)


def _call(name: str, arguments: dict[str, Any], number: int = 1) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{number}", "type": "function", "function": function}


async def _replaced(
    chunks: Any, answer: str | tuple[str, dict[str, Any]]
) -> AsyncGenerator[ChatCompletionChunk]:
    kept = [chunk async for chunk in chunks]
    with_text = [chunk for chunk in kept if chunk.choices and chunk.choices[0].delta.content]
    for chunk in with_text[1:]:
        chunk.choices[0].delta.content = ""
    delta = with_text[0].choices[0].delta
    if isinstance(answer, str):
        delta.content = answer
        for chunk in kept:
            yield chunk
        return
    delta.content = None
    delta.tool_calls = (
        ChatCompletionChunk.model_validate(
            {
                **with_text[0].to_dict(),
                "choices": [
                    {"index": 0, "delta": {"tool_calls": [{"index": 0, **_call(*answer)}]}}
                ],
            }
        )
        .choices[0]
        .delta.tool_calls
    )
    for chunk in kept:
        if chunk.choices and chunk.choices[0].finish_reason:
            chunk.choices[0].finish_reason = "tool_calls"
        yield chunk
