"""A Mixture-of-Agents as one agent of an AutoGen team."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.base import Response
from autogen_agentchat.messages import (
    BaseAgentEvent,
    BaseChatMessage,
    ModelClientStreamingChunkEvent,
    TextMessage,
)
from autogen_core import CancellationToken
from autogen_core.models import RequestUsage

from flashmoa.linking.failure_policy import UpstreamCancelled
from flashmoa.moa.answers import MixtureResult
from flashmoa.moa.mixture import MixtureOfAgents
from flashmoa.moa.prompts import Message


class MoAAgent(BaseChatAgent):
    """Answers with a mixture; in a team it is an agent like others.

    What others say are user messages to it, and what it has said are its own. Its message's
    ``metadata`` says how many agents were used, left out and failed; its usage is that of all.

    Args:
        system_message: stands before the conversation, for every agent of the mixture.
        model_client_stream: send the pieces of the last answer as they are written.
    """

    component_type = "agent"

    def __init__(
        self,
        name: str,
        mixture: MixtureOfAgents,
        *,
        description: str = "Several models that answer together.",
        system_message: str | None = None,
        model_client_stream: bool = False,
    ) -> None:
        super().__init__(name, description)
        self._mixture = mixture
        self._system = [{"role": "system", "content": system_message}] if system_message else []
        self._talk: list[Message] = []
        self._streams = model_client_stream

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        return (TextMessage,)

    async def on_messages(
        self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken
    ) -> Response:
        """Raises: MixtureFailed, and what cancelling raises."""
        async for item in self.on_messages_stream(messages, cancellation_token):
            if isinstance(item, Response):
                return item
        raise AssertionError("a stream of messages ends with its response")

    async def on_messages_stream(
        self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken
    ) -> AsyncGenerator[BaseAgentEvent | BaseChatMessage | Response]:
        self._talk += [{"role": "user", "content": one.to_model_text()} for one in messages]
        async with self._mixture.answering([*self._system, *self._talk]) as running:
            cancellation_token.add_callback(running.cancel)
            try:
                async for piece in running:
                    if self._streams:
                        yield ModelClientStreamingChunkEvent(content=piece, source=self.name)
                result = await running.result()
            except UpstreamCancelled:
                raise asyncio.CancelledError from None
        self._talk.append({"role": "assistant", "content": result.text})
        yield Response(chat_message=self._message(result))

    def _message(self, result: MixtureResult) -> TextMessage:
        agents = [one for layer in result.layers for one in layer]
        usage = [one.usage for one in agents if one.usage is not None]
        return TextMessage(
            content=result.text,
            source=self.name,
            models_usage=RequestUsage(
                prompt_tokens=sum(one.prompt_tokens for one in usage),
                completion_tokens=sum(one.completion_tokens for one in usage),
            ),
            metadata={
                status: str(sum(one.status == status for one in agents))
                for status in ("used", "left out", "failed")
            },
        )

    async def on_reset(self, cancellation_token: CancellationToken) -> None:
        self._talk.clear()
