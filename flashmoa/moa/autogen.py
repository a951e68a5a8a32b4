"""Make a Mixture-of-Agents one agent of an AutoGen team (``MoAAgent``)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence

import anyio
from anyio.streams.memory import MemoryObjectSendStream
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

from flashmoa.moa.mixture import MixtureOfAgents
from flashmoa.moa.prompts import Message
from flashmoa.moa.results import MixtureResult


class MoAAgent(BaseChatAgent):
    """Answers with a mixture; in a team it is an agent like any other.

    The mixture gets messages of other agents as user messages, and this agent's own as assistant
    messages. If it is asked again without a new message, its last answer is a user message. The
    ``metadata`` of an answer counts the mixture's agents that were used, left out
    and failed. If the last aggregator failed, ``substitution`` names what took its place. The usage
    adds up the tokens of all agents.

    Args:
        system_message: system message before the conversation, for every agent of the mixture.
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
        self._conversation: list[Message] = []
        self._sends_pieces = model_client_stream

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        """Return the types of messages that the agent answers with."""
        return (TextMessage,)

    async def on_messages(
        self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken
    ) -> Response:
        """Answer the messages with the mixture.

        Raises:
            MixtureFailed: if :meth:`MixtureOfAgents.answer` raises it.
            CancelledError: if the token was cancelled.
        """
        async for item in self.on_messages_stream(messages, cancellation_token):
            if isinstance(item, Response):
                return item
        raise AssertionError("the stream of messages ended without a response")

    async def on_messages_stream(
        self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken
    ) -> AsyncGenerator[BaseAgentEvent | BaseChatMessage | Response]:
        """Yield the pieces of the answer, if ``model_client_stream`` is set, and its response.

        Raises: as :meth:`on_messages`.
        """
        texts = [message.to_model_text() for message in messages]
        self._conversation += [{"role": "user", "content": text} for text in texts]
        send, receive = anyio.create_memory_object_stream[str](math.inf)
        # The mixture's task group must not be open where this generator yields: a consumer that
        # stops reading would leave it open, and be cancelled by it.
        answering = asyncio.create_task(self._answer(send))
        cancellation_token.link_future(answering)
        try:
            with receive:
                async for piece in receive:
                    if self._sends_pieces:
                        yield ModelClientStreamingChunkEvent(content=piece, source=self.name)
            result = await answering
        finally:
            answering.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([answering])
        self._conversation.append({"role": "assistant", "content": result.text})
        yield Response(chat_message=self._make_message(result))

    async def _answer(self, send: MemoryObjectSendStream[str]) -> MixtureResult:
        """Answer the conversation, and send the answer's pieces. Raises: as :meth:`on_messages`."""
        question = [*self._system, *self._conversation]
        if question and question[-1]["role"] == "assistant":
            # The agent is asked again, as in a team of its own, and goes on from what it said.
            question[-1] = {**question[-1], "role": "user"}
        with send:
            async with self._mixture.answering(question) as run:
                async for piece in run:
                    send.send_nowait(piece)
                return await run.result()

    def _make_message(self, result: MixtureResult) -> TextMessage:
        metadata = {
            status: str(sum(agent.status == status for agent in result.agents))
            for status in ("used", "left out", "failed")
        }
        if result.substitution is not None:
            metadata["substitution"] = f"{result.substitution.kind} {result.substitution.agent}"
        return TextMessage(
            content=result.text,
            source=self.name,
            models_usage=RequestUsage(
                prompt_tokens=result.spending.prompt_tokens,
                completion_tokens=result.spending.completion_tokens,
            ),
            metadata=metadata,
        )

    async def on_reset(self, cancellation_token: CancellationToken) -> None:
        """Forget the conversation."""
        self._conversation.clear()
