"""What links could save at most, from the calls of a run."""

from __future__ import annotations

import pytest
from flashmoa_bench.harness.critical_path import critical_path
from flashmoa_bench.plan.result import waits

from flashmoa.engine import PromptUsage
from flashmoa.observe import CallFinished, CallStarted, FirstToken
from flashmoa.observe.calls import Call

STEPS = {"one": 0.1}


def make_call(agent: str, sent: float, token: float, end: float, tokens: int = 11) -> Call:
    name = f"{agent} {sent}"
    usage = PromptUsage(prompt_tokens=500, completion_tokens=tokens)
    return Call(
        CallStarted(agent=agent, engine="one", call_id=name, at=sent),
        FirstToken(agent=agent, engine="one", call_id=name, at=token).at,
        CallFinished(agent=agent, engine="one", call_id=name, at=end, text="a", usage=usage),
    )


def test_the_bound_of_a_chain_is_every_prefill_but_the_first_less_a_step() -> None:
    chain = [make_call("a", 0, 2, 3), make_call("b", 3, 4, 5), make_call("c", 5, 5.5, 6.5)]
    run = waits(chain, STEPS)
    assert [wait.avoidable for wait in run] == pytest.approx([0, 0.9, 0.4])
    assert [wait.decode for wait in run] == pytest.approx([1, 1, 1])


def test_the_end_waits_for_the_slowest_of_the_writers_side_by_side() -> None:
    calls = [make_call("a", 0, 1, 2), make_call("b", 0, 1, 4), make_call("c", 4, 6, 7)]
    assert [call.agent for call in critical_path(calls)] == ["b", "c"]


def test_nothing_is_hidden_in_a_first_call_that_was_sent_moments_later() -> None:
    calls = [make_call("a", 0, 1, 2), make_call("b", 0.01, 1, 4), make_call("c", 4, 6, 7)]
    assert [wait.avoidable for wait in waits(calls, STEPS)] == pytest.approx([0, 1.9])


def test_no_more_can_be_hidden_than_the_run_had_lasted() -> None:
    run = waits([make_call("a", 0, 0.2, 1), make_call("b", 1, 9, 10)], STEPS)
    assert run[1].avoidable == pytest.approx(1)


def test_an_answer_in_one_piece_is_taken_to_have_been_decoded_step_by_step() -> None:
    (wait,) = waits([make_call("a", 0, 3, 3)], STEPS)
    assert wait.is_estimated
    assert (wait.prefill, wait.decode) == pytest.approx((2, 1))


def test_the_turns_of_an_agent_are_counted() -> None:
    run = waits([make_call("a", 0, 1, 2), make_call("b", 2, 3, 4), make_call("a", 4, 5, 6)], STEPS)
    assert [(wait.agent, wait.turn) for wait in run] == [("a", 1), ("b", 1), ("a", 2)]


def test_a_run_without_calls_has_nothing_to_save() -> None:
    assert waits([], STEPS) == []
