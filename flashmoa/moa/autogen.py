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

from flashmoa import UpstreamCancelled
from flashmoa.moa.mixture import MixtureOfAgents
from flashmoa.moa.prompts import Message
from flashmoa.moa.results import MixtureResult


class MoAAgent(BaseChatAgent):
    """An agent that answers with a mixture; in a team it is an agent like any other.

    Messages of other agents are user messages to it, and its own are assistant messages. Its
    message's ``metadata`` counts the agents that were used, left out and failed; its usage adds
    up all agents.

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
        """Return the types of messages that the agent answers with."""
        return (TextMessage,)

    async def on_messages(
        self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken
    ) -> Response:
        """Answer the messages with the mixture.

        Raises:
            MixtureFailed: as :meth:`MixtureOfAgents.answer`.
            CancelledError: the token was cancelled.
        """
        async for item in self.on_messages_stream(messages, cancellation_token):
            if isinstance(item, Response):
                return item
        raise AssertionError("the stream of messages ended without a response")

    async def on_messages_stream(
        self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken
    ) -> AsyncGenerator[BaseAgentEvent | BaseChatMessage | Response]:
        """Yield the pieces of the answer, if asked to, and its response.

        Raises: as :meth:`on_messages`.
        """
        self._talk += [{"role": "user", "content": one.to_model_text()} for one in messages]
        async with self._mixture.answering([*self._system, *self._talk]) as run:
            cancellation_token.add_callback(run.cancel)
            try:
                async for piece in run:
                    if self._streams:
                        yield ModelClientStreamingChunkEvent(content=piece, source=self.name)
                result = await run.result()
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
        """Forget the conversation."""
        self._talk.clear()
