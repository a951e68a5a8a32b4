"""Test predicted prompts with chat templates of the main model families."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core.models import AssistantMessage
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.errors import MalformedRequest
from flashmoa.frameworks.autogen.dry_run import agent_dry_runs
from flashmoa.link.prompt import Placeholders
from tests.chat_templates import ALTERNATING, TEMPLATES, Renderer


def reader(family: str, *, merge: bool, tools: bool) -> Any:
    """Make an agent that has already spoken once."""
    client = FlashMoAChatCompletionClient(
        model="tiny", base_url="http://127.0.0.1:9", merge_user_messages=merge
    )
    client.engine = Renderer(TEMPLATES[family])  # type: ignore[assignment]
    more: dict[str, Any] = {"tools": [look]} if tools else {}
    return AssistantAgent("reader", model_client=client, system_message="Be brief. ", **more)


async def look(place: str) -> str:
    """Look at a place."""
    return place


async def predict_and_send(
    family: str, texts: Sequence[str], *, merge: bool, tools: bool
) -> tuple[str, str, str]:
    """Return a prompt's certain text before and after its texts are written, and that sent."""
    agent = reader(family, merge=merge, tools=tools)
    context = agent._model_context
    await context.add_message(TextMessage(content="Hi", source="user").to_model_message())
    await context.add_message(AssistantMessage(content="<think>well</think>Hello", source="reader"))
    writers = [f"writer{number}" for number in range(len(texts))]
    placeholders = Placeholders(writers)
    (dry_run,) = agent_dry_runs(agent, [TextMessage(content="A trip, please.", source="user")])
    future = [TextMessage(content=placeholders.padded(name), source=name) for name in writers]
    request = await dry_run(future)
    prompt = placeholders.build_prompt(await request.render())
    before = prompt.stable()
    for slot in prompt.slots:
        slot.append(texts[writers.index(slot.name)])
        slot.close()
    written = [TextMessage(content=t, source=n) for n, t in zip(writers, texts, strict=True)]
    return before, prompt.stable(), await (await dry_run(written)).render()


@pytest.mark.parametrize("family", TEMPLATES)
@given(
    # Texts are not blank: a template that trims them leaves less text than was sent ahead, which
    # costs only time.
    texts=st.lists(
        st.text(alphabet="ab \n<>[]{}|/é漢", max_size=12).filter(str.strip), min_size=1, max_size=3
    ),
    tools=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_predicted_prompt_equals_the_prompt_sent(
    family: str, texts: list[str], tools: bool
) -> None:
    merge = family in ALTERNATING
    before, after, sent = asyncio.run(predict_and_send(family, texts, merge=merge, tools=tools))
    assert after == sent
    assert after.startswith(before) and "A trip, please." in before


@pytest.mark.parametrize("family", sorted(ALTERNATING))
def test_a_template_may_refuse_consecutive_users(family: str) -> None:
    with pytest.raises(MalformedRequest, match="alternate"):
        asyncio.run(predict_and_send(family, ["a", "b"], merge=False, tools=False))
