"""Classify texts: as an agent of a team (``ClassifierAgent``), or with a tool for agents."""

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
from flashmoa.scoring.questions import choice_question, option_letters

_INSTRUCTION = "Which of these fits best? Answer with its letter."


class ClassifierAgent(BaseChatAgent):
    """Says which of its labels fits the conversation best, from one prefill; decodes nothing.

    Its message is the label; ``metadata`` has ``probabilities`` (of every label, as JSON) and
    ``mass`` (how likely the model was to answer with a letter at all). In a linked team its
    prompt is prefilled while the agents before it write.

    Args:
        labels: 1 to 26 labels; each gets a letter, and the model is asked for a letter.
        system_message: the system message before the conversation.
        instruction: the question at the end of the conversation, below the lettered labels.

    Raises: ValueError if there are no labels, or more than 26.
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
        self._conversation: list[LLMMessage] = []

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        return (TextMessage,)

    async def on_messages(
        self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken
    ) -> Response:
        """Answer with a label.

        Raises: EngineError if the engine fails; CandidateRefused if it cannot score the letters;
            CancelledError if the call is cancelled.
        """
        self._conversation += [
            UserMessage(content=message.to_model_text(), source=message.source)
            for message in messages
        ]
        system = [SystemMessage(content=self._system)] if self._system else []
        question = UserMessage(content=self._question, source="user")
        scores = await self._model_client.score(
            [*system, *self._conversation, question],
            self._letters,
            cancellation_token=cancellation_token,
        )
        label = self._labels[self._letters.index(scores.best)]
        self._conversation.append(AssistantMessage(content=label, source=self.name))
        probabilities = {
            label: round(probability, 6)
            for label, probability in zip(self._labels, scores.probabilities, strict=True)
        }
        return Response(
            chat_message=TextMessage(
                content=label,
                source=self.name,
                models_usage=RequestUsage(
                    prompt_tokens=scores.usage.prompt_tokens, completion_tokens=0
                ),
                metadata={
                    "probabilities": json.dumps(probabilities),
                    "mass": f"{scores.mass:.6f}",
                },
            )
        )

    async def on_reset(self, cancellation_token: CancellationToken) -> None:
        self._conversation.clear()


def classify_tool(
    model_client: FlashMoAChatCompletionClient,
    labels: Sequence[str],
    *,
    name: str = "classify",
    description: str | None = None,
    instruction: str = _INSTRUCTION,
) -> FunctionTool:
    """Return a tool with which an agent asks how well each label fits a text; decodes nothing.

    Raises: ValueError if there are no labels, or more than 26.
    """
    letters, question = option_letters(len(labels)), choice_question(labels, instruction)

    async def classify(text: str, cancellation_token: CancellationToken) -> dict[str, float]:
        message = UserMessage(content=f"{text}\n\n{question}", source="user")
        scores = await model_client.score([message], letters, cancellation_token=cancellation_token)
        return dict(zip(labels, scores.probabilities, strict=True))

    description = description or f"How likely each of these fits a text: {', '.join(labels)}."
    return FunctionTool(classify, description=description, name=name)
