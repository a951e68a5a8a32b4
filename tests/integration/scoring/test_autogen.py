"""Test an agent that scores candidates in a linked team."""

import json
import logging
from collections.abc import AsyncGenerator, Sequence

import pytest
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.base import Response
from autogen_agentchat.messages import BaseChatMessage, TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken
from autogen_core.models import AssistantMessage, LLMMessage, SystemMessage, UserMessage

from flashmoa.autogen import FlashMoAChatCompletionClient, link
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import CallFinished, Event, LinkClosed
from tests.integration.support import wait_until_idle

Client = FlashMoAChatCompletionClient

LETTERS = ["A", "B", "C"]
QUESTION = "A: a plan, B: a question, C: small talk. Answer with a letter."


@pytest.fixture
async def model_client(engine: LocalEngine) -> AsyncGenerator[Client]:
    client = Client(
        model="tiny",
        base_url=engine.url,
        temperature=0,
        max_tokens=24,
        extra_body={"ignore_eos": True},
    )
    yield client
    await client.close()


class Judge(BaseChatAgent):
    """Says which letter fits the conversation best."""

    produced_message_types = (TextMessage,)

    def __init__(self, name: str, model_client: Client, system_message: str) -> None:
        super().__init__(name, "judges")
        self._model_client = model_client
        self._conversation: list[LLMMessage] = [SystemMessage(content=system_message)]

    async def on_messages(
        self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken
    ) -> Response:
        self._conversation += [
            UserMessage(content=message.to_model_text(), source=message.source)
            for message in messages
        ]
        scores = await self._model_client.score(
            [*self._conversation, UserMessage(content=QUESTION, source="user")],
            LETTERS,
            cancellation_token=cancellation_token,
        )
        self._conversation.append(AssistantMessage(content=scores.best, source=self.name))
        shares = dict(zip(LETTERS, scores.probabilities, strict=True))
        metadata = {"probabilities": json.dumps(shares)}
        message = TextMessage(content=scores.best, source=self.name, metadata=metadata)
        return Response(chat_message=message)

    async def on_reset(self, cancellation_token: CancellationToken) -> None: ...


async def test_the_prompt_of_a_scored_call_is_prefilled_in_a_linked_team(
    model_client: Client, client: EngineClient, guide: str, caplog: pytest.LogCaptureFixture
) -> None:
    messages: dict[bool, list[TextMessage]] = {}
    events: list[Event] = []
    for linked in (False, True):
        team = RoundRobinGroupChat(
            [
                AssistantAgent("writer", model_client),
                Judge("judge", model_client, guide[:3000]),
            ],
            max_turns=4,
        )
        if linked:
            link(team, listener=events.append, include=["judge"])
        with caplog.at_level(logging.WARNING):
            result = await team.run(task="Three days in Nepal.")
        assert not caplog.messages
        messages[linked] = [one for one in result.messages if isinstance(one, TextMessage)]
    sources = [message.source for message in messages[True]]
    assert sources == ["user", "writer", "judge", "writer", "judge"]
    unlinked, linked = ([message.content for message in messages[way]] for way in (False, True))
    assert unlinked == linked
    for message, other in zip(messages[True][2::2], messages[False][2::2], strict=True):
        shares = json.loads(message.metadata["probabilities"])
        assert list(shares) == LETTERS and message.content == max(shares, key=shares.__getitem__)
        assert shares == pytest.approx(json.loads(other.metadata["probabilities"]), abs=1e-4)
    calls = [one for one in events if isinstance(one, CallFinished) and one.agent == "judge"]
    assert len(calls) == 2
    for call in calls:
        assert call.usage is not None and call.usage.prompt_stream is not None
        assert call.usage.prompt_stream.status == "hit"
        assert call.usage.completion_tokens == 0
        # The guide, the task and the writer's text had been prefilled before the call.
        assert call.usage.late_tokens is not None
        assert call.usage.late_tokens < call.usage.prompt_tokens / 4
    closed = [one for one in events if isinstance(one, LinkClosed) and one.agent == "judge"]
    assert [one.reason for one in closed] == ["used", "used"]
    await wait_until_idle(client)
