"""Agents that engines refuse are left out of every kind, and cancelled runs free their engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from flashmoa.engine import EngineClient
from flashmoa.linking.failure_policy import UpstreamCancelled
from flashmoa.moa import Debate, Fallback, MixtureFailed, MixtureOfAgents, Model, Staircase, Steps
from tests.integration.moa.agents import QUESTION, agent, first_letter
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.anyio

# Makes the system of first agents and one that answers, or of voters.
Make = Callable[..., Any]
KINDS: dict[str, Make] = {
    "mixture": lambda first, last, **more: MixtureOfAgents([first, [last]], **more),
    "staircase": Staircase,
    "debate": lambda first, last, **more: Debate(first, 2, last, **more),
    "debate staircase": lambda first, last, **more: Debate(
        first, 2, last, staircase=Steps(), **more
    ),
    "vote": lambda first, _, **more: Debate(first, 2, first_letter, **more),
    "vote staircase": lambda first, _, **more: Debate(
        first, 2, first_letter, staircase=Steps(), **more
    ),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
async def test_an_agent_that_is_refused_is_left_out(
    pair: tuple[EngineClient, EngineClient], make: Make
) -> None:
    small, large = pair
    refused = agent(small, 2, temperature=-1)
    result = await make([agent(small, 1), refused], agent(large)).answer(QUESTION)
    assert [one.status for one in result.layers[0]] == ["used", "failed"]
    assert result.layers[0][1].problem and result.text
    if result.vote is not None:
        assert result.vote.ballots[1] is None and result.layers[1][1].problem
    with pytest.raises(MixtureFailed, match="no agent answered"):
        await make([refused, refused], agent(large)).answer(QUESTION)
    if result.vote is None:
        async with EngineClient("http://127.0.0.1:9") as nowhere:
            strict = Fallback(best_answer=False)
            failing = make([agent(small, 1)] * 2, Model(nowhere), fallback=strict)
            with pytest.raises(MixtureFailed, match="the last aggregator failed"):
                await failing.answer(QUESTION)
    for engine in pair:
        await wait_until_idle(engine)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
async def test_a_cancelled_run_frees_its_engines(
    pair: tuple[EngineClient, EngineClient], make: Make
) -> None:
    slow = [agent(engine, max_tokens=2000) for engine in pair]
    for engine in pair:
        await engine.flush_cache()
    endless = make(slow, slow[0])
    with anyio.move_on_after(0.3):
        await endless.answer(QUESTION)
    async with endless.answering(QUESTION) as run:
        run.cancel()
        with pytest.raises(UpstreamCancelled):
            await run.result()
    # An answer written to its end would be in the cache.
    for engine in pair:
        assert (await wait_until_idle(engine)).evictable < 2000
