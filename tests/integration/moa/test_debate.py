"""Debates on real engines: equal answers with and without links, also on a staircase."""

from itertools import pairwise
from typing import Any

import pytest

from flashmoa.engine import EngineClient
from flashmoa.moa import Debate, DebatePrompt, Model, Result, Steps
from flashmoa.observe import Event, LinkOpened
from tests.integration.moa.agents import QUESTION, agent
from tests.integration.support import wait_until_idle

PROMPT = DebatePrompt("Others say:", "\n{number}. ", staircase_instruction="You are {number}:")


def debate(pair: tuple[EngineClient, EngineClient], **more: Any) -> Debate:
    small, large = pair
    debaters = [agent(one, seed, max_tokens=24) for seed, one in enumerate((small, large, small))]
    return Debate(debaters, 3, agent(large, 5, max_tokens=24), prompt=PROMPT, **more)


def answers_by_round(result: Result) -> list[list[str]]:
    """Return the answers of each round, and the aggregator's."""
    return [[answer.text for answer in round_] for round_ in result.layers]


@pytest.mark.parametrize("steps", [None, Steps(), Steps(order="contiguous")])
async def test_linked_debate_equals_unlinked(
    pair: tuple[EngineClient, EngineClient], steps: Steps | None
) -> None:
    events: list[Event] = []
    results: list[Result] = []
    pieces: list[str] = []
    for ahead in ("nothing", "text"):
        for engine in pair:
            await engine.flush_cache()
        events.clear()
        more: Any = {"ahead": ahead, "listener": events.append, "staircase": steps}
        async with debate(pair, **more).answering(QUESTION) as debating:
            pieces = [piece async for piece in debating]
            results.append(await debating.result())
    unlinked, linked = results
    assert len(pieces) > 1 and "".join(pieces) == linked.text
    assert linked.final.name == "4.1" and linked.finish_reason == "length"
    assert answers_by_round(unlinked) == answers_by_round(linked) and unlinked.text == linked.text
    assert linked.text == linked.final.text != ""
    assert 0 < linked.time_to_first_token < linked.seconds
    for answer in linked.agents:
        assert answer.status == "used" and answer.first_token
        assert answer.usage and answer.usage.completion_tokens == 24
        # After the first round, an answer's parts of 8 and 16 tokens have a request each.
        assert len(answer.steps) == (2 if answer.layer and steps is not None else 0)
        assert "".join(step.text for step in answer.steps) in ("", answer.text)
    if steps is None:
        streams = [answer.usage.prompt_stream for answer in linked.agents if answer.usage]
        statuses = [use.status for use in streams if use is not None]
        assert statuses.count("hit") >= 3 and set(statuses) == {"hit"}
        for before, after in pairwise(linked.layers):
            last = max(read.finished or 0 for read in before)
            assert all(answer.started and last <= answer.started for answer in after)
        # Events name the agents that are read.
        opened = {event.agent: event.upstream for event in events if isinstance(event, LinkOpened)}
        assert opened["2.2"] == ("1.2", "1.1", "1.3")
    for engine in pair:
        await wait_until_idle(engine)


async def test_answers_that_do_not_fit_are_cut_to_fair_shares(
    pair: tuple[EngineClient, EngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_counts: list[int] = []

    async def room(_model: Model, _empty: object, limits: list[int | None]) -> int:
        answer_counts.append(len(limits))
        return 60

    monkeypatch.setattr(Model, "free_tokens", room)
    small, _ = pair
    debaters = [agent(small, 1, max_tokens=40), agent(small, 2)]
    two = Debate(debaters, 3, agent(small, 3), prompt=PROMPT)
    result = await two.answer(QUESTION)
    # A debater's prompt has two rounds, so that each may take half of the room.
    assert set(answer_counts) == {2, 4}
    cut = [[answer.cut_tokens for answer in round_] for round_ in result.layers]
    assert cut == [[40 - 18, 0], [40 - 18, 0], [0, 0], [0]]
