"""Test that text flows into the prompts of chats with the templates of the main model families.

An agent reads the texts of other agents as messages of the *assistant*.
"""

import pytest

from flashmoa.errors import MalformedRequest
from tests.chat_templates import ALTERNATING, TEMPLATES, Renderer
from tests.unit.frameworks.agent_framework.forecasts import Chat, ChatRunner
from tests.unit.frameworks.agent_framework.test_group_chats import by_manager, decisions
from tests.unit.frameworks.agent_framework.test_magentic import (
    MANAGER,
    ledgers,
    magentic,
    with_instructions,
)

CHATS = {"group chat": (by_manager, decisions), "magentic": (magentic, ledgers)}


@pytest.fixture(params=CHATS)
async def chat(request: pytest.FixtureRequest, chats: ChatRunner) -> Chat:
    build, script = CHATS[request.param]
    client = chats.client(with_instructions(chats, script("abca")))
    return await chats.run(build(client))


async def test_texts_flow_into_their_readers_prompts(chat: Chat) -> None:
    for family in sorted(TEMPLATES.keys() - ALTERNATING):
        renderer, flowed = Renderer(TEMPLATES[family]), 0
        for forecast in chat.forecast:
            expected, texts = forecast.expected, forecast.texts
            rendered = [await renderer.render(one.body["messages"]) for one in expected.requests]  # type: ignore[attr-defined]
            prompt = expected.placeholders.build_prompt(*rendered)
            sent = await renderer.render(forecast.body["messages"])
            for slot in prompt.slots:
                text = texts[slot.name]
                slot.append(text[:-1])
                # The instruction is cut out of JSON, so that it does not flow.
                flowed += (
                    slot.name != MANAGER
                    and sent.startswith(prompt.stable())
                    and prompt.stable().endswith(text[:-1])
                )
                slot.append(text[-1:])
                slot.close()
            assert sent.startswith(prompt.stable()), family
        assert flowed >= 7, family


@pytest.mark.parametrize("family", sorted(ALTERNATING))
async def test_a_template_may_refuse_consecutive_assistants(chat: Chat, family: str) -> None:
    """It then refuses the request, too."""
    renderer = Renderer(TEMPLATES[family])
    with pytest.raises(MalformedRequest, match="alternate"):
        await renderer.render(chat.forecast[-1].body["messages"])
