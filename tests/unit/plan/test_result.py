"""Test what a plan answers, what links could save at most, and which engine an agent gets."""

import pytest
from flashmoa_bench.harness.critical_path import critical_path
from flashmoa_bench.plan.planning import answer_lengths, place
from flashmoa_bench.plan.result import PlanResult, show, summarise, waits
from flashmoa_bench.plan.runs import WAYS, Round, TeamRun, Way, find_difference
from rich.console import Console

from flashmoa.engine import PromptUsage
from flashmoa.observe import Event, LinkDeclined
from flashmoa.observe.calls import Call, calls
from tests.unit.events import answered

GPU = "modelled h200_sxm (Qwen/Qwen3-32B, TP1, 2 times slower)"
STEPS, ONE_STEP = {"engine 1": 0.01}, {"engine 1": 0.1}
PLACEMENT = {"writer": "engine 1", "reader": "engine 1"}


def make_events(agent: str, at: float, token: float, end: float, text: str) -> list[Event]:
    usage = PromptUsage(prompt_tokens=500, completion_tokens=11)
    more = {"engine": "engine 1", "id_": f"{agent} {at}", "text": text, "usage": usage}
    return answered(agent, at, token, end, **more)


def make_round(way: Way, wait: float, text: str = "words", copy: int = 1) -> Round:
    """Make a run whose reader waits for its first token, on GPUs that are half as fast."""
    end = 2 * (3 + wait)
    events = make_events("writer", 0, 2, 4, "draft")
    events += make_events("reader", 4, end - 2, end, text)
    events.append(LinkDeclined(agent="reader", engine="", reason="of a test"))
    device = {"device_seconds": end / 2, "name": GPU}
    return Round(way, end, [TeamRun(copy, end, tuple(events))], {"engine 1": device})


def make_result(linked: tuple[float, ...] = (0.1, 0.2, 0.3)) -> PlanResult:
    rounds = [make_round("unlinked", wait) for wait in (0.6, 0.5, 0.4)]
    rounds += [make_round("linked", wait) for wait in linked]
    return summarise(rounds, STEPS, PLACEMENT, slowdown=2.0)


def shown(result: PlanResult) -> str:
    console = Console(record=True, width=120, quiet=False)
    show(result, console)
    return console.export_text()


def test_medians_are_compared_with_the_bound() -> None:
    result = make_result()
    assert result.seconds == {"unlinked": 3.5, "linked": pytest.approx(3.2)}
    assert result.spread["unlinked"] == pytest.approx((3.4, 3.6))
    assert result.saved_seconds == pytest.approx(0.3)
    assert result.bound_seconds == pytest.approx(0.5 - 0.01)
    assert [wait.agent for wait in result.calls] == ["writer", "reader"]
    prefills = [wait.linked.prefill for wait in result.calls if wait.linked is not None]
    assert prefills == pytest.approx([1, 0.2])
    assert (result.rounds, result.copies, result.slowdown) == (3, 1, 2)
    (engine,) = result.engines
    assert engine.agents == ("writer", "reader")
    assert engine.busy == {"unlinked": 0.5, "linked": 0.5}
    assert result.as_json()["busiest_engine"] == "engine 1"


def test_the_median_of_two_runs_lies_between_them() -> None:
    rounds = [make_round(way, wait) for way in WAYS for wait in (0.25, 0.75)]
    result = summarise(rounds, STEPS, PLACEMENT, slowdown=2.0)
    assert result.seconds == {"unlinked": 3.5, "linked": 3.5}
    assert result.typical["linked"].seconds == 6.5


def test_a_call_off_the_linked_path_is_found() -> None:
    """Its answer came in one piece there, so its time is a marked estimate."""
    unlinked = make_round("unlinked", 1)
    events = make_events("writer", 0, 2, 4, "draft") + make_events("reader", 4, 5, 5, "words")
    events += make_events("other", 4, 6, 7, "more")
    linked = Round("linked", 7, [TeamRun(1, 7, tuple(events))], unlinked.devices)
    result = summarise([unlinked, linked], STEPS, PLACEMENT, slowdown=2.0)
    reader = result.calls[1].linked
    assert reader is not None
    assert (reader.prefill, reader.is_estimated) == (pytest.approx(0.4), True)
    assert "~400 ms" in shown(result)


@pytest.mark.parametrize(
    ("linked", "said"),
    [
        ((0.1, 0.2, 0.3), "3.20 s   (3.10 to 3.30), saves 0.30 s, 9%"),
        ((0.7, 0.8, 0.9), "), is SLOWER by 0.30 s, 9%\n"),
        ((0.2, 0.3, 0.5), "), no difference: the ranges overlap\n"),
        ((0.5, 0.6, 0.7), "), no difference: the ranges overlap\n"),
    ],
)
def test_output_says_what_links_save(linked: tuple[float, ...], said: str) -> None:
    printed = shown(make_result(linked))
    assert said in printed
    assert ("saves" in printed) == ("links reach" in printed) == ("saves" in said)
    assert GPU in printed and "Modelled, not measured on GPUs" in printed
    assert "the runs took 2 times as long" in printed
    assert "reader is not linked: of a test" in printed


def test_only_comparable_answers_must_be_equal() -> None:
    rounds = [make_round("unlinked", 0.5), make_round("linked", 0.1)]
    assert find_difference(rounds) is None
    problem = find_difference([*rounds, make_round("linked", 0.1, "other")])
    assert "reader did not write the same text in all runs" in (problem or "")
    # Here other calls had ended before, or it is another copy.
    early = make_events("reader", 1, 1.5, 3, "other")
    writer = make_events("writer", 0, 1, 2, "draft")
    before = Round("linked", 3, [TeamRun(1, 3, (*writer, *early))], {})
    rounds[1:] = [before, make_round("linked", 0.1, "more", copy=2)]
    assert find_difference(rounds) is None


def make_call(agent: str, sent: float, token: float, end: float) -> Call:
    (call,) = calls(make_events(agent, sent, token, end, "a"))
    return call


def test_a_chains_bound_is_all_later_prefills() -> None:
    chain = [make_call("a", 0, 2, 3), make_call("b", 3, 4, 5), make_call("a", 5, 5.5, 6.5)]
    run = waits(chain, ONE_STEP)
    assert [wait.avoidable for wait in run] == pytest.approx([0, 0.9, 0.4])
    assert [wait.decode for wait in run] == pytest.approx([1, 1, 1])
    assert [(wait.agent, wait.turn) for wait in run] == [("a", 1), ("b", 1), ("a", 2)]
    assert waits([], ONE_STEP) == []


@pytest.mark.parametrize("late", [0, 0.01])
def test_the_end_waits_for_the_slowest_writer(late: float) -> None:
    """Nothing is hidden in a first call, even if it was sent moments later."""
    made = [make_call("a", 0, 1, 2), make_call("b", late, 1, 4), make_call("c", 4, 6, 7)]
    assert [call.agent for call in critical_path(made)] == ["b", "c"]
    assert [wait.avoidable for wait in waits(made, ONE_STEP)] == pytest.approx([0, 1.9])


def test_the_bound_is_at_most_the_runs_time_so_far() -> None:
    run = waits([make_call("a", 0, 0.2, 1), make_call("b", 1, 9, 10)], ONE_STEP)
    assert run[1].avoidable == pytest.approx(1)


def test_an_answer_in_one_piece_takes_its_steps() -> None:
    (wait,) = waits([make_call("a", 0, 3, 3)], ONE_STEP)
    assert (wait.is_estimated, wait.prefill, wait.decode) == pytest.approx((True, 2, 1))


ADDRESSES = {"a": ("one", "m"), "b": ("one", "m"), "c": ("two", "m"), "d": ("one", "n")}


@pytest.mark.parametrize(
    ("engines", "placed"), [(3, [0, 0, 1, 2]), (2, [0, 1, 0, 1]), (5, [0, 1, 2, 3])]
)
def test_agents_get_engines_by_address_or_in_turn(engines: int, placed: list[int]) -> None:
    assert list(place(ADDRESSES, engines).items()) == list(zip("abcd", placed, strict=True))


def test_lengths_by_name_come_first_then_for_all() -> None:
    configured = {"a": 400, "b": None}
    assert answer_lengths(configured, {None: 30, "a": 7}) == {"a": 7, "b": 30}
    assert answer_lengths(configured, {"b": 9}) == {"a": 400, "b": 9}
