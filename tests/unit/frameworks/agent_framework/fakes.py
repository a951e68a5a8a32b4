"""A client of Agent Framework with a fake engine, which keeps the streamed part of each prompt."""

import importlib
import itertools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import anyio
import openai
from agent_framework import Agent, Message, Workflow
from agent_framework.orchestrations import SequentialBuilder
from anyio.streams.memory import MemoryObjectSendStream

from flashmoa.agent_framework import FlashMoAChatClient, link
from flashmoa.engine.wire import CALL_HEADER, STREAM_HEADER
from flashmoa.observe import Event, LinkDeclined

# OpenAI's client 3 is built on httpx2, earlier ones on httpx.
_MODULE = "httpx2" if int(openai.__version__.split(".")[0]) >= 3 else "httpx"
httpx: Any = importlib.import_module(_MODULE)

ANSWER = "one two three four"
# A tool call is written in this time.
_CALLING_SECONDS = 0.09
_NUMBERS = itertools.count()
Calls = list[dict[str, Any]]
Answer = Callable[[Mapping[str, Any]], "str | Calls | tuple[str, Calls]"]


@dataclass(frozen=True)
class Sent:
    """A request that reached the fake server.

    Attributes:
        prompt: its prompt, as the server renders it.
        streamed: what links had sent of its prompt; ``None`` if it had no link.
    """

    prompt: str
    streamed: str | None

    @property
    def status(self) -> str | None:
        if self.streamed is None:
            return None
        return "hit" if self.prompt.startswith(self.streamed) else "mispredicted"


class FakeEngine:
    """Stands in for the engine and for the chat completions of a client.

    Args:
        answer: the text, the tool calls, or both, that answer a request's body.

    Attributes:
        pool_tokens: the size of its KV pool.
    """

    def __init__(self, client: FlashMoAChatClient, answer: Answer) -> None:
        self.sent: list[Sent] = []
        self.pool_tokens = 100_000
        self._answer = answer
        self._streams: dict[str, str] = {}
        engine: Any = client.engine
        engine.render, engine.open_stream, engine.append = self._render, self._open, self._append
        engine.delete_stream = engine.keep_alive = self._ignore
        engine.hear = self._hear
        engine.kv_pool_tokens = self._count_pool
        self._channels: dict[str, MemoryObjectSendStream[dict[str, Any]]] = {}
        openai: Any = client.client
        openai._client._transport = _Transport(self._chat)

    @property
    def statuses(self) -> list[str | None]:
        return [sent.status for sent in self.sent]

    async def _render(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> str:
        return render(messages, fields.get("tools"))

    async def _open(self, *, text: str = "", **_: Any) -> Any:
        name = f"stream {len(self._streams)}"
        self._streams[name] = text
        return self._state(name, 0)

    async def _append(
        self, name: str, seq: int, *, text: str | None = None, start: int | None = None, **_: Any
    ) -> Any:
        self._streams[name] = self._streams[name][:start] + (text or "")
        return self._state(name, seq + 1)

    @asynccontextmanager
    async def _hear(self, channel: str) -> AsyncGenerator[AsyncGenerator[dict[str, Any]]]:
        async def lines() -> AsyncGenerator[dict[str, Any]]:
            async for line in heard:
                yield line

        self._channels[channel], heard = anyio.create_memory_object_stream[dict[str, Any]](100)
        with self._channels[channel], heard:
            yield lines()

    async def _count_pool(self) -> int:
        return self.pool_tokens

    async def _ignore(self, _: str) -> None: ...

    def _state(self, name: str, next_seq: int) -> Any:
        return SimpleNamespace(
            id=name,
            next_seq=next_seq,
            pace_seconds=0.001,
            received_tokens=0,
            prefilled_tokens=0,
            ttl_seconds=30.0,
        )

    async def _chat(self, request: Any) -> Any:
        body: dict[str, Any] = json.loads(await request.aread())
        streamed = self._streams.get(request.headers.get(STREAM_HEADER, ""))
        self.sent.append(Sent(render(body["messages"], body.get("tools")), streamed))
        text, tool_calls = split_answer(self._answer(body))
        if body.get("stream"):
            words = _Words((text or "").split(), tool_calls)
            return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=words)
        call = request.headers.get(CALL_HEADER, "").replace("-", "")
        await self._write(call, (text or "").split())
        if tool_calls:
            await anyio.sleep(_CALLING_SECONDS)
        message = {"role": "assistant", "content": text, "tool_calls": tool_calls}
        reason = "tool_calls" if tool_calls else "stop"
        return httpx.Response(200, json=_completion(reason, message=message))

    async def _write(self, call: str, words: Sequence[str]) -> None:
        """Write words one after the other, and tell a channel of them once it is open."""
        at, untold = 0, list[dict[str, Any]]()
        for word in words:
            await anyio.sleep(0.03)
            content = f" {word}" if at else word
            untold.append({"call": call, "content": content, "at": at})
            at += len(content)
            while untold and call[:16] in self._channels:
                await self._channels[call[:16]].send(untold.pop(0))


class _Transport(httpx.AsyncBaseTransport):
    """Answers chat completions by a function."""

    def __init__(self, answer: Callable[[Any], Awaitable[Any]]) -> None:
        self._answer = answer

    async def handle_async_request(self, request: Any) -> Any:
        return await self._answer(request)


class _Words(httpx.AsyncByteStream):
    """Is a stream of words that are written one after the other, and of tool calls after them."""

    def __init__(self, words: Sequence[str], tool_calls: Calls | None) -> None:
        self._words = words
        self._tool_calls = tool_calls

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        for index, word in enumerate(self._words):
            await anyio.sleep(0.03)
            yield _event(_completion(None, delta={"content": f" {word}" if index else word}))
        if self._tool_calls is not None:
            await anyio.sleep(_CALLING_SECONDS)
            calls = [{"index": place, **call} for place, call in enumerate(self._tool_calls)]
            yield _event(_completion(None, delta={"tool_calls": calls}))
        yield _event(_completion("tool_calls" if self._tool_calls else "stop", delta={}))


def split_answer(answer: str | Calls | tuple[str, Calls]) -> tuple[str | None, Calls | None]:
    """Return an answer's text and tool calls."""
    if isinstance(answer, str):
        return answer, None
    return answer if isinstance(answer, tuple) else (None, answer)


def call_tool(name: str, **arguments: object) -> Calls:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return [{"id": f"call-{next(_NUMBERS)}", "type": "function", "function": function}]


def _completion(reason: str | None, **message: Any) -> dict[str, Any]:
    kind = "chat.completion" if "message" in message else "chat.completion.chunk"
    choice = {"index": 0, "finish_reason": reason, **message}
    return {"id": "1", "object": kind, "created": 1, "model": "m", "choices": [choice]}


def _event(data: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def render(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """Render a prompt as a chat template does."""
    parts = [f"[{json.dumps(tools)}]" if tools else ""]
    for message in messages:
        name = f":{message['name']}" if message.get("name") else ""
        calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        parts.append(f"<{message['role']}{name}>{message.get('content')}{calls}")
    return "".join([*parts, "<assistant>"])


def make_client(
    answer: Answer = lambda _: ANSWER, **settings: Any
) -> tuple[FlashMoAChatClient, FakeEngine]:
    client = FlashMoAChatClient("m", base_url="http://127.0.0.1:9/v1", **settings)
    return client, FakeEngine(client, answer)


def agent(client: Any, name: str, **settings: Any) -> Agent[Any]:
    return Agent(client, f"You are {name}.", name=name, **settings)


def chain(client: FlashMoAChatClient, *participants: Any) -> Workflow:
    """Make a sequence of an agent "a" and the participants, by default another agent "b"."""
    rest = participants or (agent(client, "b"),)
    return SequentialBuilder(participants=[agent(client, "a"), *rest]).build()


async def run_linked(
    workflow: Workflow, *, task: str | Message = "task", runs: int = 1, **options: Any
) -> list[str]:
    """Link a workflow and run it. Return the reasons why agents were not linked."""
    events: list[Event] = []
    linked = link(workflow, listener=events.append)
    for _ in range(runs):
        await workflow.run(task, **options)
    await linked.close()
    return [event.reason for event in events if isinstance(event, LinkDeclined)]
