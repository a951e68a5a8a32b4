"""Test debates on a staircase, on real engines."""

from __future__ import annotations

from typing import Any

import pytest

from flashmoa.engine import EngineClient
from flashmoa.linking.link import Ahead
from flashmoa.moa import Debate, DebatePrompt, Result, Steps
from tests.integration.moa.agents import QUESTION, agent, answers_by_round, first_letter
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.anyio

PROMPT = DebatePrompt(heading="\n{number}. ", staircase_instruction="You are {number}:")


def debate(pair: tuple[EngineClient, EngineClient], conclusion: Any, **more: Any) -> Debate:
    small, large = pair
    debaters = [agent(small, 1, max_tokens=24), agent(large, 2, max_tokens=24)]
    return Debate(debaters, 3, conclusion, **{"prompt": PROMPT, "staircase": Steps(), **more})


async def test_linked_debate_equals_unlinked(pair: tuple[EngineClient, EngineClient]) -> None:
    ways: list[Ahead] = ["nothing", "text"]
    results: list[Result] = []
    for ahead in ways:
        for engine in pair:
            await engine.flush_cache()
        results.append(await debate(pair, first_letter, ahead=ahead).answer(QUESTION))
    unlinked, linked = results
    assert answers_by_round(unlinked) == answers_by_round(linked)
    assert linked.vote is not None and linked.vote.ballots[0] is not None
    assert linked.text == linked.layers[-1][linked.vote.place].text
    assert 0 < linked.time_to_first_token < linked.seconds
    for number, round_ in enumerate(linked.layers):
        for answer in round_:
            assert answer.status == "used"
            assert answer.usage and answer.usage.completion_tokens == 24
            assert answer.started and answer.first_token and answer.finished
            # After the first round, an answer's parts of 8 and 16 tokens have a request each.
            assert len(answer.steps) == (2 if number else 0)
            assert "".join(step.text for step in answer.steps) == (answer.text if number else "")
    for engine in pair:
        await wait_until_idle(engine)


async def test_aggregator_writes_along_with_debaters(
    pair: tuple[EngineClient, EngineClient],
) -> None:
    concluded = debate(pair, agent(pair[1], 5, max_tokens=24), staircase=Steps(order="contiguous"))
    async with concluded.answering(QUESTION) as debating:
        pieces = [piece async for piece in debating]
        result = await debating.result()
    assert len(pieces) > 1 and "".join(pieces) == result.text
    assert len(result.final.steps) == 2
    assert result.final.first_token is not None and result.finish_reason == "length"
