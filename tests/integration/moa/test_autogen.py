"""Test a mixture as an agent of an AutoGen team."""

from __future__ import annotations

import asyncio

import anyio
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
    async with EngineClient(engine.url) as asking:
        several = MoAAgent("several", mixture(asking), model_client_stream=True)
        team = RoundRobinGroupChat([AssistantAgent("first", client), several], max_turns=4)
        items = [item async for item in team.run_stream(task="What is there to see?")]
        said = [item for item in items if isinstance(item, TextMessage)]
        assert [one.source for one in said] == ["user", "first", "several", "first", "several"]
        chunks = [one for one in items if isinstance(one, ModelClientStreamingChunkEvent)]
        streamed = "".join(one.content for one in chunks if one.source == "several")
        assert streamed == said[2].content + said[4].content
        assert said[2].metadata == {"used": "3", "left out": "0", "failed": "0"}
        assert said[2].models_usage is not None and said[2].models_usage.completion_tokens == 24
        # It gets the whole conversation, with its own messages as the assistant's.
        talk = [{"role": "user", "content": one.content} for one in said[:4]]
        talk[2]["role"] = "assistant"
        assert (await mixture(asking).answer(talk)).text == said[4].content
    await client.close()


async def test_cancelled_moa_agent_frees_its_engines(engine: LocalEngine) -> None:
    async with EngineClient(engine.url) as asking:
        agent = MoAAgent("several", mixture(asking, tokens=2000))
        token = CancellationToken()
        messages = [TextMessage(content="What is there to see?", source="user")]
        running = asyncio.ensure_future(agent.on_messages(messages, token))
        with anyio.fail_after(20):
            while not (await asking.info()).kv[0].protected:  # noqa: ASYNC110 - there is no event
                await anyio.sleep(0.02)
        token.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await wait_until_idle(asking)
