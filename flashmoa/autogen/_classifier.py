"""Classifying in a team: an agent, and a tool for agents."""

from __future__ import annotations

import json
from collections.abc import Sequence

from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.base import Response
from autogen_agentchat.messages import BaseChatMessage, TextMessage
from autogen_core import CancellationToken
from autogen_core.models import (
    AssistantMessage,
    LLMMessage,
    RequestUsage,
    SystemMessage,
    UserMessage,
)
from autogen_core.tools import FunctionTool

from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.scoring.candidates import choice_question, option_letters

_INSTRUCTION = "Which of these fits best? Answer with its letter."


class ClassifierAgent(BaseChatAgent):
    """Says which of its labels fits the conversation best, from one prefill; decodes nothing.

    Its message is the label; ``metadata`` has ``probabilities``, of every label as JSON, and
    ``mass``, how likely the model was to answer with a letter at all. In a linked team its
    prompt is prefilled while those before it write.

    Args:
        labels: 26 at most; the model is asked for one by its letter.
        system_message: stands before the conversation.
        instruction: is asked at its end, below the lettered labels.

    Raises: ValueError for labels that cannot be lettered.
    """

    component_type = "agent"

    def __init__(
        self,
        name: str,
        model_client: FlashMoAChatCompletionClient,
        labels: Sequence[str],
        *,
        description: str = "An agent that classifies what has been said.",
        system_message: str | None = None,
        instruction: str = _INSTRUCTION,
    ) -> None:
        super().__init__(name, description)
        self._model_client = model_client
        self._labels = list(labels)
        self._letters = option_letters(len(self._labels))
        self._question = choice_question(self._labels, instruction)
        self._system = system_message
        self._talk: list[LLMMessage] = []

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        return (TextMessage,)

    async def on_messages(
        self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken
    ) -> Response:
        """Raises: EngineError, CandidateRefused, and what cancelling raises."""
        self._talk += [
            UserMessage(content=one.to_model_text(), source=one.source) for one in messages
        ]
        system = [SystemMessage(content=self._system)] if self._system else []
        question = UserMessage(content=self._question, source="user")
        scores = await self._model_client.score(
            [*system, *self._talk, question],
            self._letters,
            cancellation_token=cancellation_token,
        )
        label = self._labels[self._letters.index(scores.best)]
        self._talk.append(AssistantMessage(content=label, source=self.name))
        each = zip(self._labels, scores.probabilities, strict=True)
        return Response(
            chat_message=TextMessage(
                content=label,
                source=self.name,
                models_usage=RequestUsage(
                    prompt_tokens=scores.usage.prompt_tokens, completion_tokens=0
                ),
                metadata={
                    "probabilities": json.dumps({one: round(share, 6) for one, share in each}),
                    "mass": f"{scores.mass:.6f}",
                },
            )
        )

    async def on_reset(self, cancellation_token: CancellationToken) -> None:
        self._talk.clear()


def classify_tool(
    model_client: FlashMoAChatCompletionClient,
    labels: Sequence[str],
    *,
    name: str = "classify",
    description: str | None = None,
    instruction: str = _INSTRUCTION,
) -> FunctionTool:
    """A tool with which an agent asks how well each label fits a text; decodes nothing.

    Raises: ValueError for labels that cannot be lettered.
    """
    answers, question = option_letters(len(labels)), choice_question(labels, instruction)

    async def classify(text: str, cancellation_token: CancellationToken) -> dict[str, float]:
        asked = UserMessage(content=f"{text}\n\n{question}", source="user")
        scores = await model_client.score([asked], answers, cancellation_token=cancellation_token)
        return dict(zip(labels, scores.probabilities, strict=True))

    described = description or f"How likely each of these fits a text: {', '.join(labels)}."
    return FunctionTool(classify, description=described, name=name)
