"""Script the answers of a tiny random model: its computation is real, but its text is useless.

Tools that such answers call may wait for the links of their run.
"""

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import anyio
import httpx
import pytest
from openai._base_client import AsyncHttpxClientWrapper

from flashmoa.engine import EngineClient
from flashmoa.observe import Event, LinkClosed, LinkOpened
from tests.waiting import LAG, until

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


class LinkWatch:
    """Lets the tools of a linked run wait for events of the run's links.

    The tools of an unlinked run do not wait.
    """

    def __init__(self, engine: EngineClient, *, is_linked: bool = True) -> None:
        self.events: list[Event] = []
        self.engine = engine
        self.is_linked = is_linked

    @property
    def opened(self) -> list[LinkOpened]:
        return [event for event in self.events if isinstance(event, LinkOpened)]

    @property
    def own_links(self) -> list[LinkOpened]:
        """The links to requests that agents send after tools whose results are not known."""
        return [one for one in self.opened if one.upstream and one.upstream[0].endswith("()")]

    def reasons(self, links: list[LinkOpened] | None = None) -> list[str]:
        """Return why links were closed; by default, why ``own_links`` were closed."""
        ids = [link.stream_id for link in (self.own_links if links is None else links)]
        ended = [event for event in self.events if isinstance(event, LinkClosed)]
        return [event.reason for event in ended if event.stream_id in ids]

    async def until(self, is_so: Callable[[], object]) -> None:
        await until(lambda: not self.is_linked or is_so())

    async def prefilled(self, tokens: int = 0, links: int = 1) -> int:
        """Wait until the latest link to an own request has KV for nearly all that is certain.

        Args:
            tokens: least number of certain tokens to wait for.
            links: number of links to own requests to wait for.

        Return the number of tokens that are certain.
        """
        await self.until(lambda: len(self.own_links) >= links)
        with anyio.fail_after(60):
            while self.is_linked:
                state = await self.engine.stream_state(self.own_links[-1].stream_id)
                if tokens <= state.received_tokens <= state.prefilled_tokens + LAG:
                    return state.received_tokens
                await anyio.sleep(0.002)
        return 0


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
