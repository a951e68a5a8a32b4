"""Test that the calls of a program are expected, and their messages."""

import operator
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.link import learned_runs
from flashmoa.link.learned_runs import LearnedRun, Program, RecordedRequest
from flashmoa.link.learned_texts import FindText
from tests.unit.link.learning import asking, running

PLAN = "Walk, eat and rest."


def make_request(
    *contents: str, url: str = "http://engine", model: str = "tiny", **fields: Any
) -> RecordedRequest:
    messages = [{"role": "user", "content": content} for content in contents]
    return RecordedRequest(url, model, messages, fields)


def play(run: LearnedRun, name: str, request: RecordedRequest, answer: str | None) -> str:
    """Make one call of a run. Return its key."""
    call = run.begin(name, request)
    run.complete(call, answer)
    return call.key


def learn(*calls: tuple[str, RecordedRequest, str | None]) -> Program:
    """Return a program after one run."""
    with running(program := Program()) as run:
        for call in calls:
            play(run, *call)
    return program


def chain(place: str = "Nepal") -> Program:
    return learn(
        ("plan", make_request(f"A trip to {place}"), PLAN),
        ("check", make_request(f"Check this for {place}:\n{PLAN}"), "Fine."),
        ("sum", make_request(f"{PLAN}\nFine."), "Done."),
    )


def test_names_of_parallel_calls_are_known() -> None:
    program = Program()
    run = LearnedRun(program)
    play(run, "turns", make_request("a"), "b")
    run.fail(run.begin("turns", make_request("c")))
    play(run, "turns", make_request("d"), "e")
    # The second call is never answered.
    crowds = [run.begin("crowd", make_request(f"{number}")) for number in range(3)]
    assert run.parallel == {"crowd"}
    run.complete(crowds[0], "x")
    run.complete(crowds[2], "x")
    play(run, "turns", make_request("f"), "g")
    run.finish()
    # It is known before the calls of the next run begin.
    assert LearnedRun(program).parallel == {"crowd"}


def contents(messages: Any) -> list[str]:
    return [message["content"] for message in messages]


def test_an_expected_call_has_this_runs_texts() -> None:
    run = LearnedRun(chain())
    play(run, "plan", make_request("A trip to Norway"), "Ski.")
    texts = {"plan": "Ski.", "check": "<check>", "sum": "<sum>"}
    assert contents(run.predict("check", texts.get)) == ["Check this for Norway:\nSki."]
    assert contents(run.predict("sum", texts.get)) == ["Ski.\n<check>"]


@pytest.mark.parametrize(
    ("answers", "asked", "texts", "expected"),
    [
        # The program strips an answer.
        ([f" {PLAN}\n"], [f"Check: {PLAN}"], {"plan": " Ski.\n"}, ["Check: Ski."]),
        # An empty answer stands for nothing.
        ([" "], ["", "Check"], {"plan": "Ski.", "check": "Fine."}, ["", "Check"]),
        # If answers are equal, the last known one counts.
        ([PLAN, PLAN], [f"Check: {PLAN}"], {"plan": "Ski.", "plan (2)": "Swim."}, ["Check: Swim."]),
        ([PLAN, PLAN], [f"Check: {PLAN}"], {"plan": "Ski."}, ["Check: Ski."]),
    ],
)
def test_answers_in_messages_are_found(
    answers: list[str], asked: list[str], texts: dict[str, str], expected: list[str]
) -> None:
    plans = [("plan", make_request(f"Trip {n}"), answer) for n, answer in enumerate(answers)]
    program = learn(*plans, ("check", make_request(*asked), ""))
    assert contents(LearnedRun(program).predict("check", texts.get)) == expected


def test_a_prompt_has_no_later_answer() -> None:
    """A word of the instructions may be the whole answer, or another agent's."""
    with running(program := Program()) as run:
        play(run, "plan", make_request("A trip to Nepal"), PLAN)
        request = make_request(f"Say fine or poor.\n{PLAN}")
        judge, other = run.begin("judge", request), run.begin("other", make_request("Poor?"))
        run.complete(other, "poor")
        run.complete(judge, "fine")
    texts = {"plan": "<plan>", "judge": "<judge>", "other": "<other>"}
    predicted = LearnedRun(program).predict("judge", texts.get)
    assert contents(predicted) == ["Say fine or poor.\n<plan>"]


def test_a_wrong_prediction_is_not_repeated() -> None:
    program = learn(
        ("plan", make_request("A trip"), PLAN),
        ("check", make_request(f"It is 12:01. Check:\n{PLAN}"), "Fine."),
    )
    with running(program) as run:
        play(run, "plan", make_request("A trip"), PLAN)
        play(run, "check", make_request(f"It is 12:07. Check:\n{PLAN}"), "Fine.")
    differed = program.example["check"].differed
    assert differed is not None and (differed.message, differed.offset) == (0, len("It is 12:0"))


def test_calls_of_one_agent_are_told_apart() -> None:
    reviews = [make_request(f"Reviewer {number}.", PLAN) for number in range(20)]
    program = learn(*[("review", review, "1") for review in reviews])
    run = LearnedRun(program)
    keys = [play(run, "review", review, "1") for review in reversed(reviews)]
    assert keys == list(program.example)[::-1]


@pytest.mark.parametrize("question", ["Translate: {}", "{}"])
def test_equal_calls_are_expected_in_their_order(question: str) -> None:
    def ask_all(*words: str) -> list[str]:
        with running(program) as run:
            requests = [make_request(question.format(word)) for word in words]
            return [play(run, "ask", request, "") for request in requests]

    program = Program()
    assert ask_all("Black", "Red", "Blue") == ["ask", "ask (2)", "ask (3)"]
    assert ask_all("Rose", "Brown", "Ruby") == list(program.example)


class CountingRun(LearnedRun):
    """Counts its predictions."""

    predictions = 0

    def predict(self, key: str, find_text: FindText) -> Any:
        self.predictions += 1
        return super().predict(key, find_text)


def test_a_call_is_predicted_a_few_times() -> None:
    requests = [make_request(f"Summarise: {number}") for number in range(100)]
    run = CountingRun(learn(*[("ask", request, "Short.") for request in requests]))
    for request in requests:
        before = run.predictions
        play(run, "ask", request, "Short.")
        assert run.predictions <= before + 10
    # A call that can be only one is predicted once.
    run = CountingRun(chain())
    play(run, "plan", make_request("A trip to Norway"), "Ski.")
    assert run.predictions == 1


def count_lines(work: Callable[[], object]) -> int:
    """Return how many lines of Python some work runs, with each round of a loop."""
    lines = 0

    def trace(_frame: object, event: str, _value: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def ask_number(run: LearnedRun, number: int) -> None:
    play(run, "ask", make_request(f"Summarise: {number}"), f"Page {number}, in short.")


def fail_number(run: LearnedRun, number: int) -> None:
    run.fail(run.begin("ask", make_request(f"Summarise: {number}", url="http://down")))
    ask_number(run, number)


def use_tool(run: LearnedRun, number: int) -> None:
    messages = [{"role": "user", "content": f"Look up {number}"}]
    function = {"name": "look", "arguments": f"{number}"}
    answer = {"role": "assistant", "tool_calls": [{"id": f"id {number}", "function": function}]}
    call = run.begin("look", asking(messages))
    run.complete(call, tool_answer=answer)
    run.next_key(call)
    result = {"role": "tool", "content": f"It is {number}."}
    following = run.begin("look", asking([*messages, answer, result]))
    assert following.follows == call.key
    run.complete(following, "There.")


@pytest.mark.parametrize("step", [ask_number, fail_number, use_tool])
def test_the_work_does_not_grow_with_the_calls(step: Callable[[LearnedRun, int], None]) -> None:
    def take_step(run: LearnedRun, number: int) -> None:
        step(run, number)
        run.upcoming(2)
        for key in islice(run.example, 1):
            run.predict(key, run.texts())

    program = Program()
    for _ in range(3):
        costs: dict[int, int] = {}
        with running(program) as run:
            for number in range(501):
                if number in (100, 500):
                    costs[number] = count_lines(partial(take_step, run, number))
                else:
                    take_step(run, number)
        assert costs[500] <= 1.2 * costs[100] + 50


def test_no_more_calls_than_streams_are_expected() -> None:
    with running(program := Program()) as run:
        for number in range(300):
            run.begin("ask", make_request(f"Summarise: {number}"))
    assert LearnedRun(program).upcoming(2) == list(run.calls)[:256]


def test_common_parts_of_calls_are_in_memory_once() -> None:
    run, answer = LearnedRun(Program()), "".join(["Walk", " and eat."])
    first = run.begin("first", make_request("System.", "Plan.", tools=[{"strict": True}]))
    run.complete(first, answer)
    contents = ("System.", "Plan.", "Walk" + " and eat.", "Go on.")
    second = run.begin("second", make_request(*contents, tools=[{"strict": 1}, {"strict": True}]))
    messages = second.request.messages
    assert all(map(operator.is_, first.request.messages, messages))
    assert messages[2]["content"] is first.answer
    tools = second.request.fields["tools"]
    assert tools[1] is first.request.fields["tools"][0] and tools[0] is not tools[1]
    assert repr(tools[0]) == "{'strict': 1}"


def test_the_beginning_of_a_long_run_is_learned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(learned_runs, "MAX_RECORDED_BYTES", 50_000)
    learned_runs._warn_of_size.cache_clear()
    program = Program()
    for _ in range(2):
        run = LearnedRun(program)
        keys = [play(run, "ask", make_request(f"{number}"), "Yes.") for number in range(100)]
        assert len(set(keys)) == 100
        late = run.begin("late", make_request("Is it?"))
        run.complete(late, "It is.")  # Its call is not known any more when its answer comes again.
        run.complete(late, "It is.")
        run.finish()
        assert [*program.recorded] == keys[: len(program.recorded)]
        assert 10 < len(program.recorded) < 40 and [*run.calls] == [*program.recorded]
    (warning,) = caplog.records
    assert "only its beginning is learned from" in warning.getMessage()


def test_lengths_are_forgotten_with_their_calls() -> None:
    """Or else names of agents that contain a user's name would be kept for ever."""
    program = Program()
    for number in range(3):
        with running(program) as run:
            key = play(run, f"agent of user {number}", make_request("A trip"), PLAN)
            program.output_lengths.add(key, 7)
        known = [f"agent of user {each}" for each in range(3)]
        assert [program.output_lengths.expect(each) for each in known].count(7) == 1


def test_a_retried_request_is_the_same_call() -> None:
    run = LearnedRun(Program())
    call = run.begin("plan", make_request("A trip"))
    run.fail(call)
    again = replace(make_request("A trip"), headers={"authorization": "Bearer of now"})
    assert run.begin("plan", again) is call
    assert call.request.headers == {"authorization": "Bearer of now"}
    assert run.begin("plan", make_request("A trip")).key == "plan (2)"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"url": "http://one"}, {"url": "http://other"}),
        ({"model": "one"}, {"model": "other"}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "high"}),
    ],
)
def test_a_question_to_two_servers_is_told_apart(one: Any, other: Any) -> None:
    program = learn(
        ("ask", make_request("A trip", **one), "1"), ("ask", make_request("A trip", **other), "2")
    )
    run = LearnedRun(program)
    assert play(run, "ask", make_request("A tour", **other), "2") == "ask (2)"
    assert play(run, "ask", make_request("A tour", **one), "1") == "ask"
    # If nothing fits better, the call is the same.
    run = LearnedRun(learn(("ask", make_request("A trip", **one), "1")))
    assert run.begin("ask", make_request("A trip", **other)).key == "ask"


def test_a_call_like_none_of_its_name_is_new() -> None:
    program = learn(
        ("ask", make_request("A trip"), PLAN), ("ask", make_request(f"Check:\n{PLAN}"), "Fine.")
    )
    run = LearnedRun(program)
    play(run, "ask", make_request("A trip"), PLAN)
    assert play(run, "ask", make_request("Which month?"), "May.") == "ask (3)"
    assert play(run, "ask", make_request(f"Check:\n{PLAN}"), "Fine.") == "ask (2)"


def play_with_dead_server(program: Program) -> tuple[list[str], list[str]]:
    """Ask a server that is down and then another one, twice, always with the same name.

    Return the keys of the answered calls and of the failed calls.
    """
    kept: list[str] = []
    failed: list[str] = []
    with running(program) as run:
        for content in ("A trip", f"Check:\n{PLAN}"):
            call = run.begin("go", make_request(content, url="http://down"))
            run.fail(call)
            failed.append(call.key)
            kept.append(play(run, "go", make_request(content), PLAN))
    return kept, failed


def test_a_failed_request_takes_no_calls_place() -> None:
    program = Program()
    first = play_with_dead_server(program)
    assert first == (["go (2)", "go (4)"], ["go", "go (3)"])
    assert list(program.example) == first[0]
    assert play_with_dead_server(program) == first == play_with_dead_server(program)


@given(st.lists(st.integers(0, 9), max_size=24), st.sets(st.integers(0, 9)), st.integers(1, 3))
def test_upcoming_calls_need_only_begun_ones(steps: list[int], begun: set[int], ahead: int) -> None:
    """A number's first time begins its call, its second time completes the call."""
    program = Program()
    run = LearnedRun(program)
    done: set[str] = set()
    needs: dict[str, set[str]] = {}
    for step in steps:
        name = f"agent {step}"
        if name not in needs:
            run.begin(name, make_request(name))
            needs[name] = set(done)
        else:
            run.complete(run.calls[name])
            done.add(name)
    run.finish()
    again = LearnedRun(program)
    known = {f"agent {step}" for step in begun} & needs.keys()
    for name in known:
        again.begin(name, make_request(name))
    expected: set[str] = set()
    for _ in range(ahead):
        expected |= {name for name, needed in needs.items() if needed <= known | expected}
    assert set(again.upcoming(ahead)) == expected - known


def test_a_tool_call_has_no_text_that_others_get() -> None:
    program = learn(
        ("ask", make_request("Where?"), None), ("tell", make_request("Where?", "Here."), "There.")
    )
    run = LearnedRun(program)
    run.begin("ask", make_request("Where?"))
    assert run.upcoming(1) == ["tell"]
    assert contents(run.predict("tell", run.texts())) == ["Where?", "Here."]
