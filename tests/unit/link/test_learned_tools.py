"""Test that an agent's request after its tools is expected."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.engine import EngineClient
from flashmoa.link.expected import Turn
from flashmoa.link.learned_links import LearnedLinkPlanner
from flashmoa.link.learned_runs import LearnedRun, Program, RecordedCall, likely_results
from flashmoa.link.options import LinkSettings
from flashmoa.observe.events import ignore
from tests.unit.link.learning import asking, running

Call = tuple[str, str]
ASKED = [{"role": "user", "content": "Where?"}]


def make_answer(*calls: Call, **more: Any) -> dict[str, Any]:
    """Return an answer with calls of ``look``: ids and arguments."""
    made = [
        {"id": id_, "type": "function", "function": {"name": "look", "arguments": argument}}
        for id_, argument in calls
    ]
    return {"role": "assistant", "content": None, "tool_calls": made, **more}


def results(answer: dict[str, Any], *texts: str) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": text}
        for call, text in zip(answer["tool_calls"], texts, strict=True)
    ]


def ask(run: LearnedRun, messages: Sequence[Any], answer: str | dict[str, Any]) -> RecordedCall:
    """Make one call of a run."""
    call = run.begin("agent", asking(messages))
    if isinstance(answer, str):
        run.complete(call, answer)
    else:
        run.complete(call, tool_answer=answer)
    return call


def play(run: LearnedRun, answer: dict[str, Any], *texts: str) -> RecordedCall:
    """Make a call that calls tools, and the call after the tools. Return the second call."""
    ask(run, ASKED, answer)
    return ask(run, [*ASKED, answer, *results(answer, *texts)], "There.")


def learn(answer: dict[str, Any], *texts: str) -> Program:
    with running(program := Program()) as run:
        play(run, answer, *texts)
    return program


def expected(program: Program, answer: dict[str, Any], *missing: str) -> list[Any]:
    """Return the messages that are expected after an answer in a new run."""
    run = LearnedRun(program)
    call = ask(run, ASKED, answer)
    return list(run.after_tools(call, run.texts(), missing))[len(ASKED) + 1 :]


@pytest.mark.parametrize("id_", [5, [5], None])
def test_ids_of_calls_may_be_of_any_kind(id_: Any) -> None:
    """A server's odd answer must end neither its call nor the program's later runs."""
    program = learn(make_answer((id_, "x")), "Here.")
    assert play(LearnedRun(program), make_answer((id_, "x")), "Here.").follows == "agent"


def test_in_a_first_run_every_result_is_missing() -> None:
    answer = make_answer(("a", "lake"), ("b", "hill"))
    run = LearnedRun(Program())
    call = ask(run, ASKED, answer)
    messages = run.after_tools(call, run.texts(), ["<1>", "<2>"])
    assert messages == [*ASKED, answer, *results(answer, "<1>", "<2>")]


def test_the_call_after_tools_is_found_by_ids() -> None:
    run = LearnedRun(Program())
    answer = make_answer(("id 1", "lake"))
    first = ask(run, ASKED, answer)
    key = run.next_key(first)
    rewritten = {**answer, "content": "", "refusal": None}
    other = run.begin("agent", asking(ASKED))
    after = run.begin("other line", asking([*ASKED, rewritten, *results(answer, "Fine.")]))
    assert (after.key, after.follows) == (key, first.key) and other.key not in (key, first.key)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Hand over."}, make_answer(("id 1", "lake"))],
        ASKED,
        [*ASKED, make_answer(("id 2", "lake"))],
        [*ASKED, {"role": "user", "content": ""}],
    ],
)
def test_another_history_does_not_follow(messages: list[Any]) -> None:
    run = LearnedRun(Program())
    ask(run, ASKED, make_answer(("id 1", "lake")))
    assert run.begin("agent", asking(messages)).follows is None


def test_answers_with_equal_ids_are_followed_once() -> None:
    """Some servers number the calls of each answer anew."""
    run, answer = LearnedRun(Program()), make_answer(("call_0", "lake"))
    asked = [ask(run, ASKED, answer) for _ in range(2)]
    following = [*ASKED, answer, *results(answer, "Blue.")]
    followed = [ask(run, following, "There.").follows for _ in range(3)]
    assert followed == [*(call.key for call in asked), None]


def test_results_are_expected_again_with_new_ids() -> None:
    program = learn(make_answer(("id 1", "lake"), ("id 2", "hill")), "Blue.", "Green.")
    answer = make_answer(("id 3", "lake"), ("id 4", "city"))
    assert expected(program, answer, "<1>", "<2>") == results(answer, "Blue.", "<2>")
    assert expected(program, make_answer(("id 3", "lake")), "<1>")[0]["content"] == "<1>"


def test_a_changed_result_is_not_expected_again() -> None:
    with running(program := learn(make_answer(("id 1", "lake")), "Blue.")) as run:
        play(run, make_answer(("id 2", "lake")), "Green.")
    answer = make_answer(("id 3", "lake"))
    assert expected(program, answer, "<1>") == results(answer, "<1>")


def test_an_agents_text_is_an_expected_result() -> None:
    answer = make_answer(("id 1", "lake"))
    with running(program := Program()) as run:
        ask(run, ASKED, answer)
        run.complete(run.begin("inner", asking([{"role": "user", "content": "Look!"}])), "A lake.")
        ask(run, [*ASKED, answer, *results(answer, "It says: A lake.")], "There.")
    run, answer = LearnedRun(program), make_answer(("id 2", "the lake"))
    call = ask(run, ASKED, answer)
    messages = run.after_tools(call, {"inner": "<inner>"}.get, ["<1>"])
    assert messages[-1]["content"] == "It says: <inner>"


def test_no_call_is_expected_if_none_followed() -> None:
    with running(program := Program()) as run:
        ask(run, ASKED, make_answer(("id 1", "lake")))
    run = LearnedRun(program)
    assert run.next_key(ask(run, ASKED, make_answer(("id 2", "lake")))) is None


def test_extra_fields_are_expected_as_sent_back() -> None:
    program = Program()
    for is_sent_back in (True, False):
        run = LearnedRun(program)
        answer = make_answer(("id 1", "lake"), reasoning_content="Hm.")
        kept = answer if is_sent_back else make_answer(("id 1", "lake"))
        ask(run, ASKED, answer)
        second = ask(run, [*ASKED, kept, *results(answer, "Blue.")], answer)
        assert run.after_tools(second, run.texts(), ["<1>"])[-2] == kept


@given(st.lists(st.tuples(st.uuids().map(str), st.text()), min_size=1, max_size=4), st.data())
def test_each_call_has_one_result_in_its_place(calls: list[Call], data: st.DataObject) -> None:
    answer = make_answer(*calls)
    texts = [data.draw(st.text()) for _ in calls]
    # A text that equals the id of an earlier call stands for the id of the call in its place.
    ids = {f"{n}": id_ for n, (id_, _) in enumerate(calls)}
    earlier = make_answer(*[(id_, data.draw(st.text())) for id_ in ids])
    messages = expected(learn(earlier, *texts), answer, *[f"<{n}>" for n in range(len(calls))])
    assert [message["tool_call_id"] for message in messages] == [id_ for id_, _ in calls]
    for number, message in enumerate(messages):
        text = ids.get(texts[number], texts[number])
        assert message["content"] in (text, f"<{number}>")


@pytest.mark.parametrize("has_run", [False, True])
async def test_a_forced_choice_is_expected_if_it_came(has_run: bool) -> None:
    rendered: list[dict[str, Any]] = []
    fields = {"tools": [{}], "tool_choice": "required", "reasoning_effort": "low"}

    class Engine:
        url = "http://engine"

        async def render(self, messages: Any, **fields: Any) -> str:
            rendered.append(fields)
            return "".join(message.get("content") or "" for message in messages)

    answer, program = make_answer(("id", "lake")), Program()
    if has_run:
        with running(program) as run:
            run.complete(run.begin("agent", asking(ASKED, fields)), tool_answer=answer)
            run.begin("agent", asking([*ASKED, answer, *results(answer, "Blue.")], fields))
    engine = cast("EngineClient", Engine())
    planner = LearnedLinkPlanner(program, ignore, lambda *_: engine, LinkSettings())
    planner.observe("agent", asking(ASKED, fields), "it calls tools")
    planner._learned.complete(planner._learned.calls["agent"], tool_answer=answer)
    turn = planner.request_after_tools("agent", answer)
    assert turn is not None
    await (await turn.expect(Turn(turn.agent))).prompt()
    await planner.close(learn=False)
    choice = {"tool_choice": "required"} if has_run else {}
    assert rendered == [{"tools": [{}], "reasoning_effort": "low", **choice}]


def test_results_of_custom_tools_are_likely_too() -> None:
    def ask(text: str) -> dict[str, Any]:
        call = {"id": "c", "type": "custom", "custom": {"name": "run", "input": text}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    answer, messages = ask("a"), results(ask("a"), "1")
    assert likely_results(answer, ask("a"), messages, messages, None) == messages
    assert likely_results(answer, ask("b"), messages, messages, None) == []
