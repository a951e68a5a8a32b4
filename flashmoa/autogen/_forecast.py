"""What an agent will send next, told by AutoGen's own code.

A *shadow dry run*: a shallow copy of the agent with a cloned model context and a client that
only listens is given the messages the agent already has and stand-ins for those still being
written. The copy builds its prompt as the agent will; nothing of the team is changed.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import BaseAgentEvent, BaseChatMessage, TextMessage
from autogen_core import CancellationToken
from autogen_core.models import CreateResult, LLMMessage

from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.prompts import Prompt, Slot

# White space around a stand-in shows what the chat template strips.
_MARGIN = "  "


class NotForecastable(Exception):
    """This agent's next prompt cannot be known, and why."""


class _Captured(Exception):
    """Carries a prompt out of the dry run."""

    def __init__(self, messages: Sequence[LLMMessage], tools: Sequence[Any]) -> None:
        super().__init__()
        self.messages = list(messages)
        self.tools = list(tools)


class _ListeningClient:
    """Stands in for a model client and stops the run at its first call."""

    def __init__(self, real: FlashMoAChatCompletionClient) -> None:
        self.model_info = real.model_info

    async def create(
        self, messages: Sequence[LLMMessage], *, tools: Sequence[Any] = (), **_: Any
    ) -> CreateResult:
        raise _Captured(messages, tools)

    async def create_stream(
        self, messages: Sequence[LLMMessage], *, tools: Sequence[Any] = (), **_: Any
    ) -> AsyncGenerator[Any]:
        raise _Captured(messages, tools)
        yield  # pragma: no cover - makes this a generator


def client_of(agent: Any) -> FlashMoAChatCompletionClient | None:
    """The FlashMoA client of a stock agent, if it has one."""
    client = getattr(agent, "_model_client", None)
    return client if isinstance(client, FlashMoAChatCompletionClient) else None


async def forecast(
    agent: Any, known: Sequence[BaseAgentEvent | BaseChatMessage], upstream: Sequence[str]
) -> Prompt:
    """The prompt ``agent`` will send once ``upstream`` agents have written, in that order.

    Args:
        agent: an ``AssistantAgent``; others may have side effects a dry run would repeat.
        known: messages it has received since its last turn.
        upstream: who will write before it speaks, each one text message.

    Raises:
        NotForecastable: the agent's kind, its client or its chat template do not allow it.
        EngineError: its engine could not render the prompt.
    """
    client = client_of(agent)
    if client is None or not _is_stock(agent):
        raise NotForecastable(f"{agent.name} is not a stock AssistantAgent on a FlashMoA client")
    stand_ins = {name: f"{_MARGIN}[{name}:{secrets.token_hex(8)}]{_MARGIN}" for name in upstream}
    future = [TextMessage(content=text, source=name) for name, text in stand_ins.items()]
    captured = await _dry_run(agent, client, [*known, *future])
    params = client._process_create_args(captured.messages, captured.tools, "auto", None, {})
    extra_body: dict[str, Any] = client._create_args.get("extra_body") or {}
    rendered = await client.engine.render(
        [dict(message) for message in params.messages],
        tools=[dict(tool) for tool in params.tools],
        template_args=extra_body.get("chat_template_kwargs"),
    )
    return _split(rendered, stand_ins)


def _is_stock(agent: Any) -> bool:
    return (
        isinstance(agent, AssistantAgent)
        and type(agent).on_messages_stream is AssistantAgent.on_messages_stream
    )


async def _dry_run(
    agent: AssistantAgent, client: FlashMoAChatCompletionClient, messages: Sequence[Any]
) -> _Captured:
    shadow: Any = copy.copy(agent)
    shadow._model_client = _ListeningClient(client)
    shadow._model_context = copy.copy(agent._model_context)
    shadow._model_context._messages = list(agent._model_context._messages)
    shadow._memory = None  # Asking memory may cost or change something; it goes last anyway.
    try:
        async for _ in shadow.on_messages_stream(messages, CancellationToken()):
            pass
    except _Captured as captured:
        return captured
    raise NotForecastable(f"{agent.name} answered without asking its model")


def _split(rendered: str, stand_ins: dict[str, str]) -> Prompt:
    """Cut a rendered prompt at its stand-ins."""
    segments: list[str | Slot] = []
    rest = rendered
    for name, padded in stand_ins.items():
        core = padded.strip()
        before, found, after = rest.partition(core)
        if not found or core in after:
            raise NotForecastable(f"the chat template does not show {name}'s text exactly once")
        stripped_start = not before.endswith(_MARGIN)
        stripped_end = not after.startswith(_MARGIN)
        segments.append(before if stripped_start else before[: -len(_MARGIN)])
        segments.append(Slot(name, strip_start=stripped_start, strip_end=stripped_end))
        rest = after if stripped_end else after[len(_MARGIN) :]
    return Prompt([*segments, rest])
