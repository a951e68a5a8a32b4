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


def test_a_chains_bound_is_all_later_prefills() -> None:
    chain = [make_call("a", 0, 2, 3), make_call("b", 3, 4, 5), make_call("a", 5, 5.5, 6.5)]
    run = waits(chain, STEPS)
    assert [wait.avoidable for wait in run] == pytest.approx([0, 0.9, 0.4])
    assert [wait.decode for wait in run] == pytest.approx([1, 1, 1])
    assert [(wait.agent, wait.turn) for wait in run] == [("a", 1), ("b", 1), ("a", 2)]
    assert waits([], STEPS) == []


@pytest.mark.parametrize("late", [0, 0.01])
def test_the_end_waits_for_the_slowest_writer(late: float) -> None:
    """Nothing is hidden in a first call, even if it was sent moments later."""
    calls = [make_call("a", 0, 1, 2), make_call("b", late, 1, 4), make_call("c", 4, 6, 7)]
    assert [call.agent for call in critical_path(calls)] == ["b", "c"]
    assert [wait.avoidable for wait in waits(calls, STEPS)] == pytest.approx([0, 1.9])


def test_the_bound_is_at_most_the_runs_time_so_far() -> None:
    run = waits([make_call("a", 0, 0.2, 1), make_call("b", 1, 9, 10)], STEPS)
    assert run[1].avoidable == pytest.approx(1)


def test_an_answer_in_one_piece_takes_its_steps() -> None:
    (wait,) = waits([make_call("a", 0, 3, 3)], STEPS)
    assert wait.is_estimated
    assert (wait.prefill, wait.decode) == pytest.approx((2, 1))
