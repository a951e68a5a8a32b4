"""A client of Agent Framework whose engine is fake: it says what was streamed to which prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import anyio
from agent_framework import Agent, Message, Workflow
from agent_framework.orchestrations import SequentialBuilder
from openai.types.chat import ChatCompletion

from flashmoa.agent_framework import FlashMoAChatClient, link
from flashmoa.completions import WatchedBody
from flashmoa.observe import Event, LinkDeclined

ANSWER = "one two three four"
Answer = Callable[[Mapping[str, Any]], "str | list[dict[str, Any]]"]


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
        answer: the text, or the tool calls, that answer a request's body.
    """

    def __init__(self, client: FlashMoAChatClient, answer: Answer) -> None:
        self.sent: list[Sent] = []
        self.rendered: list[dict[str, Any]] = []
        self._answer = answer
        self._streams: dict[str, str] = {}
        engine: Any = client.engine
        engine.render, engine.open_stream, engine.append = self._render, self._open, self._append
        engine.delete_stream = engine.keep_alive = self._ignore
        completions: Any = client.client.chat.completions
        completions.create = self._create

    async def _render(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> str:
        self.rendered.append(fields)
        return render(messages, fields.get("tools"))

    async def _open(self, *, text: str = "", **_: Any) -> Any:
        name = f"stream {len(self._streams)}"
        self._streams[name] = text
        return self._state(name, 0)

    async def _append(self, name: str, seq: int, *, text: str | None = None, **_: Any) -> Any:
        self._streams[name] += text or ""
        return self._state(name, seq + 1)

    async def _ignore(self, _: str) -> None: ...

    def _state(self, name: str, next_seq: int) -> Any:
        return SimpleNamespace(
            id=name, next_seq=next_seq, pace_seconds=0.001, received_tokens=0, prefilled_tokens=0
        )

    async def _create(self, **request: Any) -> ChatCompletion:
        body = request.get("extra_body") or {}
        streamed = self._streams.get(body.get("prompt_stream_id"))
        self.sent.append(Sent(render(request["messages"], request.get("tools")), streamed))
        answer = self._answer(request)
        text, tool_calls = (answer, None) if isinstance(answer, str) else (None, answer)
        for index, word in enumerate((text or "").split()):
            await anyio.sleep(0.03)
            if isinstance(body, WatchedBody) and body.taps:
                body.on_text(f" {word}" if index else word)
        message = {"role": "assistant", "content": text, "tool_calls": tool_calls}
        reason = "tool_calls" if tool_calls else "stop"
        return ChatCompletion.model_validate({
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "finish_reason": reason, "message": message}],
        })  # fmt: skip


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
    """Link a workflow and run it. Return the reasons for which agents were not linked."""
    events: list[Event] = []
    linked = link(workflow, listener=events.append)
    for _ in range(runs):
        await workflow.run(task, **options)
    await linked.close()
    return [event.reason for event in events if isinstance(event, LinkDeclined)]
