"""``MoAAgent``: a mixture as an agent of an AutoGen team."""

from __future__ import annotations

import asyncio

import anyio
import anyio.lowlevel
import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ModelClientStreamingChunkEvent, TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.moa import AggregationPrompt, MixtureOfAgents, Model
from flashmoa.moa.autogen import MoAAgent
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.anyio


def mixture(engine: EngineClient, tokens: int = 8) -> MixtureOfAgents:
    model = Model(engine, sampling={"temperature": 0, "max_tokens": tokens, "ignore_eos": True})
    return MixtureOfAgents(
        [[model, model], [model]], prompt=AggregationPrompt(instruction="Weigh:")
    )


async def test_moa_agent_takes_part_in_a_team(engine: LocalEngine) -> None:
    client = FlashMoAChatCompletionClient(
        model="m", base_url=engine.url, temperature=0, max_tokens=6
    )
    async with EngineClient(engine.url) as direct:
        agent = MoAAgent("mixture", mixture(direct), model_client_stream=True)
        team = RoundRobinGroupChat([AssistantAgent("first", client), agent], max_turns=4)
        items = [item async for item in team.run_stream(task="What is there to see?")]
        messages = [item for item in items if isinstance(item, TextMessage)]
        sources = [message.source for message in messages]
        assert sources == ["user", "first", "mixture", "first", "mixture"]
        chunks = [item for item in items if isinstance(item, ModelClientStreamingChunkEvent)]
        streamed = "".join(chunk.content for chunk in chunks if chunk.source == "mixture")
        first, last = messages[2], messages[4]
        assert streamed == first.content + last.content
        assert first.metadata == {"used": "3", "left out": "0", "failed": "0"}
        assert first.models_usage is not None and first.models_usage.completion_tokens == 24
        # The mixture got the whole conversation, with the agent's messages as the assistant's.
        conversation = [{"role": "user", "content": message.content} for message in messages[:4]]
        conversation[2]["role"] = "assistant"
        assert (await mixture(direct).answer(conversation)).text == last.content
    await client.close()


async def test_moa_agent_in_a_team_of_its_own_goes_on_from_its_answer(engine: LocalEngine) -> None:
    async with EngineClient(engine.url) as direct:
        team = RoundRobinGroupChat([MoAAgent("mixture", mixture(direct))], max_turns=2)
        result = await team.run(task="What is there to see?")
        first, second = [item for item in result.messages if item.source == "mixture"]
        texts = ["What is there to see?", first.to_text()]
        question = [{"role": "user", "content": text} for text in texts]
        assert second.to_text() == (await mixture(direct).answer(question)).text


async def test_consumer_that_stops_reading_goes_on_and_frees_the_engines(
    engine: LocalEngine,
) -> None:
    """The consumer does not close the stream of messages either, as AutoGen's teams do not."""
    async with EngineClient(engine.url) as direct:
        agent = MoAAgent("mixture", mixture(direct, tokens=300), model_client_stream=True)
        messages = [TextMessage(content="What is there to see?", source="user")]

        async def read_one() -> None:
            async for item in agent.on_messages_stream(messages, CancellationToken()):
                assert isinstance(item, ModelClientStreamingChunkEvent)
                break

        await read_one()
        await anyio.lowlevel.checkpoint()
        await wait_until_idle(direct)


async def test_cancelled_moa_agent_frees_its_engines(engine: LocalEngine) -> None:
    async with EngineClient(engine.url) as direct:
        agent = MoAAgent("mixture", mixture(direct, tokens=2000))
        token = CancellationToken()
        messages = [TextMessage(content="What is there to see?", source="user")]
        running = asyncio.ensure_future(agent.on_messages(messages, token))
        with anyio.fail_after(20):
            while not (await direct.info()).kv[0].protected:  # noqa: ASYNC110 - there is no event
                await anyio.sleep(0.02)
        token.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await wait_until_idle(direct)
