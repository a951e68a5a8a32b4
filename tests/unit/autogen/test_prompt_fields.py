"""A call's prompt is rendered and counted with all that its client will send for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.autogen._client import render
from flashmoa.autogen._dry_run import first_call, make_capturing_client

pytestmark = pytest.mark.anyio

MESSAGES = [UserMessage(content="Hi", source="user")]
ARGS = {"enable_thinking": False}


class Recorder:
    """Records the fields of what it is to render."""

    def __init__(self) -> None:
        self.fields: list[dict[str, Any]] = []

    async def render(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> str:
        self.fields.append(fields)
        return ""


def look(place: str) -> str:
    """Look at a place."""
    return place


@pytest.fixture
def client() -> FlashMoAChatCompletionClient:
    return FlashMoAChatCompletionClient(
        model="tiny",
        base_url="http://127.0.0.1:9",
        reasoning_effort="high",
        extra_body={"chat_template_kwargs": ARGS, "reasoning": {"enabled": True}},
    )


async def test_a_predicted_call_is_rendered_with_its_own_fields(
    client: FlashMoAChatCompletionClient,
) -> None:
    client.engine = recorder = Recorder()  # type: ignore[assignment]
    tools = [FunctionTool(look, "Look.")]
    capturing = make_capturing_client(AssistantAgent("one", client), included=True)
    call = await first_call(
        capturing.create(
            MESSAGES,
            tools=tools,
            tool_choice=tools[0],
            extra_create_args={"reasoning_effort": "low"},
            json_output=False,
        )
    )
    await render(client, call.messages, call.tools, **call.options)
    (fields,) = recorder.fields
    assert [tool["function"]["name"] for tool in fields.pop("tools")] == ["look"]
    assert fields == {
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "reasoning_effort": "low",
        "reasoning": {"enabled": True},
        "chat_template_kwargs": ARGS,
    }


async def test_a_scored_call_is_rendered_with_what_scoring_gives_templates(
    client: FlashMoAChatCompletionClient,
) -> None:
    client.engine = recorder = Recorder()  # type: ignore[assignment]
    capturing = make_capturing_client(AssistantAgent("one", client), included=True)
    call = await first_call(capturing.score(MESSAGES, ["yes", "no"]))
    await render(client, call.messages, call.tools, **call.options)
    assert recorder.fields == [{"chat_template_kwargs": ARGS}]


def test_tokens_are_counted_with_the_clients_fields(
    client: FlashMoAChatCompletionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[dict[str, Any]] = []

    def request(method: str, url: str, **more: Any) -> httpx.Response:
        bodies.append(more["json"])
        return httpx.Response(200, json={"count": 3}, request=httpx.Request(method, url))

    monkeypatch.setattr(httpx, "request", request)
    assert client.count_tokens(MESSAGES) == 3
    assert bodies[-1]["reasoning_effort"] == "high"
    assert bodies[-1]["chat_template_kwargs"] == ARGS
