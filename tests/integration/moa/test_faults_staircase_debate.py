"""Whatever goes wrong with one agent's engine, staircases and debates have an answer."""

from __future__ import annotations

from typing import Any

import pytest

from flashmoa.engine import EngineClient
from flashmoa.moa import AggregationPrompt, Debate, DebatePrompt, Fallback, Model, Staircase, Steps
from tests.integration.moa.agents import (
    PROBLEMS,
    agent,
    check_agent,
    faulty,
    read_answer,
)
from tests.integration.moa.faulty_proxy import FAULTS, Fault, FaultyProxy
from tests.integration.support import slow, wait_until_idle

pytestmark = pytest.mark.anyio

PROMPT = AggregationPrompt("question-first", "Weigh these answers:")


def staircase_or_debate(kind: str, debaters: list[Model], last: Model, **more: Any) -> Any:
    if kind == "staircase":
        return Staircase(debaters, last, prompt=PROMPT, **more)
    prompt = DebatePrompt(heading="\n{number}. ")
    steps = Steps() if kind == "debate staircase" else None
    return Debate(debaters, 2, last, prompt=prompt, staircase=steps, **more)


KINDS = ("staircase", "debate", "debate staircase")
FAST = (("staircase", "stall"), ("debate", "hang"), ("debate staircase", "refuse"))
KIND_CELLS = [
    (kind, fault) if (kind, fault) in FAST else slow(kind, fault)
    for kind in KINDS
    for fault in FAULTS
]


@pytest.mark.parametrize(("kind", "fault"), KIND_CELLS)
async def test_staircases_and_debates_answer_without_an_agent_that_fails(
    pair: tuple[EngineClient, EngineClient],
    proxy: FaultyProxy,
    proxied: EngineClient,
    kind: str,
    fault: Fault,
) -> None:
    small, large = pair
    proxy.fault = fault
    debaters = [agent(small, 1, max_tokens=24), faulty(proxied, fault, max_tokens=24)]
    system = staircase_or_debate(kind, debaters, agent(large, 3, max_tokens=24))
    text, result = await read_answer(system)
    assert text == result.text != "" and result.substitution is None
    record = next(one for one in result.agents if one.name == "1.2")
    if fault == "stall" and "staircase" in kind:
        # What it had written was read.
        assert record.status == "used" and PROBLEMS[fault] in record.problem
    else:
        check_agent(record, fault)


@pytest.mark.parametrize(("kind", "fault"), KIND_CELLS)
async def test_staircases_and_debates_answer_without_their_aggregator(
    pair: tuple[EngineClient, EngineClient],
    proxy: FaultyProxy,
    proxied: EngineClient,
    kind: str,
    fault: Fault,
) -> None:
    small, large = pair
    proxy.fault = fault
    debaters = [agent(small, 1, max_tokens=24), agent(small, 2, max_tokens=24)]
    last = faulty(proxied, fault, max_tokens=40)
    other = Fallback([agent(large, 3, max_tokens=24)])
    for fallback in (other, Fallback()):
        system = staircase_or_debate(kind, debaters, last, fallback=fallback)
        text, result = await read_answer(system)
        assert result.text
        if fault == "endless":
            assert result.substitution is None
        elif fallback is other:
            assert result.substitution.kind == "aggregator"
            assert text == result.text
        else:
            assert result.substitution.kind == "answer"
            name = "1.1" if kind == "staircase" else "2.1"
            [author] = [one for one in result.agents if one.name == name]
            assert result.text == author.text and text.endswith(result.text)
    await wait_until_idle(small)
