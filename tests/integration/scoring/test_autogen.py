"""Test a classifier in a team, and as a tool."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken

from flashmoa.autogen import ClassifierAgent, FlashMoAChatCompletionClient, classify_tool, link
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import CallFinished, Event, LinkClosed
from flashmoa.scoring import Scorer
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.anyio
Client = FlashMoAChatCompletionClient

LABELS = ["a plan", "a question", "small talk"]


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


async def test_classifiers_prompt_is_prefilled_in_a_linked_team(
    model_client: Client, client: EngineClient, guide: str, caplog: pytest.LogCaptureFixture
) -> None:
    messages: dict[bool, list[TextMessage]] = {}
    events: list[Event] = []
    for linked in (False, True):
        team = RoundRobinGroupChat(
            [
                AssistantAgent("writer", model_client),
                ClassifierAgent("judge", model_client, LABELS, system_message=guide[:3000]),
            ],
            max_turns=4,
        )
        if linked:
            link(team, listener=events.append)
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
        assert list(shares) == LABELS and message.content == max(shares, key=shares.__getitem__)
        assert shares == pytest.approx(json.loads(other.metadata["probabilities"]), abs=1e-4)
        assert message.models_usage is not None and message.models_usage.completion_tokens == 0
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


async def test_classify_tool_returns_the_probability_of_each_label(
    model_client: Client, client: EngineClient, words: Callable[[int, int], str]
) -> None:
    text = words(30, 41)
    tool = classify_tool(model_client, LABELS)
    found = await tool.run_json({"text": text}, CancellationToken())
    expected = await Scorer(client).choose(
        [{"role": "user", "content": text}],
        LABELS,
        instruction="Which of these fits best? Answer with its letter.",
    )
    assert list(found) == LABELS
    assert list(found.values()) == pytest.approx(expected.probabilities, abs=1e-4)
    assert "a plan, a question, small talk" in tool.description


async def test_classifier_refuses_more_labels_than_letters(model_client: Client) -> None:
    with pytest.raises(ValueError, match="not for 27"):
        ClassifierAgent("judge", model_client, [str(number) for number in range(27)])
