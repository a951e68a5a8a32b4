"""Script the answers of a tiny random model: its computation is real, but its text is useless."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest
from openai._base_client import AsyncHttpxClientWrapper

FunctionCall = tuple[str, dict[str, Any]]
# A text; a function's name and arguments; or several calls, with a text before them if any.
Answer = str | FunctionCall | list[str | FunctionCall]
# Returns the answer to a request, given its body; ``None`` for the engine's own answer.
Script = Callable[[dict[str, Any]], Answer | None]


def script(monkeypatch: pytest.MonkeyPatch, answer_to: Script) -> None:
    """Replace the answers of engines to OpenAI's clients once they are computed."""

    async def send(self: Any, request: Any, **options: Any) -> Any:
        answer = answer_to(json.loads(request.content))
        # ``send`` of httpx or httpx2, so that a second script replaces the first script.
        base: Any = super(AsyncHttpxClientWrapper, self)
        response = await base.send(request, **options)
        if answer is None or response.is_error:
            return response
        if options.get("stream"):
            response.stream = _ScriptedStream(response, answer)
            return response
        whole = response.json()
        _replace(whole["choices"][0], "message", answer)
        return type(response)(response.status_code, json=whole, request=request)

    monkeypatch.setattr(AsyncHttpxClientWrapper, "send", send)


def call_until(results: int, answer: Answer) -> Script:
    """Script an agent with tools: it calls them until it has that many results."""

    def answer_to(request: dict[str, Any]) -> Answer | None:
        done = sum(message["role"] == "tool" for message in request["messages"])
        return answer if request.get("tools") and done < results else None

    return answer_to


class _ScriptedStream(httpx.AsyncByteStream):
    """Yields an answer's events; the first ones with text have the scripted answer instead.

    A text comes in one event, and the calls after it in the next, as from an engine.
    """

    def __init__(self, response: httpx.Response, answer: Answer) -> None:
        self._events, self._answer = response.stream, answer

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        assert isinstance(self._events, httpx.AsyncByteStream)
        body = b"".join([piece async for piece in self._events])
        answers = iter(_split(self._answer))
        for line in body.decode().split("\n\n"):
            data = line.removeprefix("data: ")
            if not data.startswith("{"):
                yield f"{line}\n\n".encode()
                continue
            event = json.loads(data)
            for choice in event["choices"]:
                if choice["delta"].get("content"):
                    choice["delta"]["content"] = None
                    if (answer := next(answers, None)) is not None:
                        _replace(choice, "delta", answer)
                if choice.get("finish_reason") and not isinstance(self._answer, str):
                    choice["finish_reason"] = "tool_calls"
            yield f"data: {json.dumps(event)}\n\n".encode()

    async def aclose(self) -> None:
        assert isinstance(self._events, httpx.AsyncByteStream)
        await self._events.aclose()


def _split(answer: Answer) -> list[Answer]:
    parts = answer if isinstance(answer, list) else [answer]
    calls = [part for part in parts if not isinstance(part, str)]
    return [*(part for part in parts if isinstance(part, str)), *([calls] if calls else [])]


def _replace(choice: dict[str, Any], key: str, answer: Answer) -> None:
    parts = answer if isinstance(answer, list) else [answer]
    calls = [_call(*part) for part in parts if not isinstance(part, str)]
    choice[key]["content"] = next((part for part in parts if isinstance(part, str)), None)
    if not calls:
        return
    numbered = [{"index": n, "id": f"call_{n + 1}", **call} for n, call in enumerate(calls)]
    choice[key]["tool_calls"] = numbered
    if key == "message":
        choice["finish_reason"] = "tool_calls"


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
