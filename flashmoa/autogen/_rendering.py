"""A call's prompt as its engine will see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autogen_core.models import LLMMessage
from autogen_core.tools import Tool, ToolSchema

if TYPE_CHECKING:
    from flashmoa.autogen._client import FlashMoAChatCompletionClient


async def render(
    client: FlashMoAChatCompletionClient,
    messages: Sequence[LLMMessage],
    tools: Sequence[Tool | ToolSchema],
) -> str:
    """The text of a call's prompt, by its engine's chat template. Raises: EngineError."""
    params = client._process_create_args(messages, tools, "auto", None, {})
    extra_body: dict[str, Any] = client._create_args.get("extra_body") or {}
    return await client.engine.render(
        [dict(message) for message in params.messages],
        tools=[dict(tool) for tool in params.tools],
        template_args=extra_body.get("chat_template_kwargs"),
    )
