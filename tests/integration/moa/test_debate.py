"""Debates on real engines: equal answers with and without links, failures and cancellation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from flashmoa.engine import EngineClient
from flashmoa.linking.link import Ahead
from flashmoa.moa import Debate, DebatePrompt, Model, Result
from flashmoa.observe import Event, LinkOpened
from tests.integration.moa.agents import QUESTION, agent, answers_by_round, first_letter

pytestmark = pytest.mark.anyio

PROMPT = DebatePrompt("Others say:", "\n{number}. ")


def debate(pair: tuple[EngineClient, EngineClient], conclusion: Any, **more: Any) -> Debate:
    small, large = pair
    debaters = [agent(small, 1), agent(large, 2), agent(small, 3)]
    return Debate(debaters, 3, conclusion, **{"prompt": PROMPT, **more})


async def test_linked_debate_equals_unlinked(pair: tuple[EngineClient, EngineClient]) -> None:
    ways: list[Ahead] = ["nothing", "text"]
    events: list[Event] = []
    results: list[Result] = []
    for ahead in ways:
        for engine in pair:
            await engine.flush_cache()
        events.clear()
        debating = debate(pair, first_letter, ahead=ahead, listener=events.append)
        results.append(await debating.answer(QUESTION))
    unlinked, linked = results
    assert answers_by_round(unlinked) == answers_by_round(linked) and unlinked.text == linked.text
    assert linked.vote is not None
    assert linked.text == linked.layers[-1][linked.vote.place].text != ""
    assert linked.vote.ballots == tuple(first_letter(answer.text) for answer in linked.layers[-1])
    usages = [answer.usage for round_ in linked.layers for answer in round_]
    streams = [usage.prompt_stream for usage in usages if usage]
    statuses = [use.status for use in streams if use is not None]
    assert statuses.count("hit") >= 3 and set(statuses) == {"hit"}
    for before, after in pairwise(linked.layers):
        for answer in after:
            assert answer.started and answer.first_token and answer.finished
            assert answer.status == "used"
            assert all(read.finished and read.finished <= answer.started for read in before)
    # Events name the agents that are read.
    upstream = {event.agent: event.upstream for event in events if isinstance(event, LinkOpened)}
    assert upstream["2.2"] == ("1.2", "1.1", "1.3")


async def test_aggregator_concludes_and_streams_its_answer(
    pair: tuple[EngineClient, EngineClient],
) -> None:
    concluded = debate(pair, agent(pair[1], 5))
    async with concluded.answering(QUESTION) as debating:
        pieces = [piece async for piece in debating]
        result = await debating.result()
    assert len(pieces) > 1 and "".join(pieces) == result.text
    assert result.final.text == result.text and result.final.name == "4.1"
    assert result.vote is None and len(result.layers) == 4


async def test_answers_that_do_not_fit_are_cut_to_fair_shares(
    pair: tuple[EngineClient, EngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_counts: list[int] = []

    async def room(_model: Model, _empty: object, limits: list[int | None]) -> int:
        answer_counts.append(len(limits))
        return 60

    monkeypatch.setattr(Model, "free_tokens", room)
    small, _ = pair
    two = Debate([agent(small, 1, max_tokens=40), agent(small, 2)], 3, first_letter, prompt=PROMPT)
    result = await two.answer(QUESTION)
    # A prompt has two rounds, so that each may take half of the room.
    assert set(answer_counts) == {4}
    cut = [[answer.cut_tokens for answer in round_] for round_ in result.layers]
    assert cut == [[40 - 18, 0], [40 - 18, 0], [0, 0]]
