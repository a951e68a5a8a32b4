"""Test that fields which change from run to run cut predictions where prompts show them."""

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.link.learned_fields import ChangingFields
from flashmoa.link.learned_runs import LearnedRun, Program, RecordedRequest
from flashmoa.link.learned_texts import common_prefix

NAMES = ["writer", "critic", "editor", "chair"]
PARAMETERS = {"place": {"type": "string"}, "far": {"type": "boolean"}, "day": {"type": "integer"}}
Fields = dict[str, Any]
# Returns the fields of a call, given the number of the run and the call's place in it.
Make = Callable[[int, int], Fields]


def tool(name: str, parameters: Mapping[str, Any] = PARAMETERS) -> Fields:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def render(fields: Mapping[str, Any], user: str) -> str:
    """Render a prompt as chat templates do: tools follow the system message."""
    kwargs = fields.get("chat_template_kwargs") or {}
    tools = fields.get("tools")
    shown = f"# Tools\n{json.dumps(tools)}" if tools else ""
    date = f"Today is {kwargs['date']}. " if "date" in kwargs else ""
    thought = "" if kwargs.get("enable_thinking", True) else "<think></think>"
    return f"<system>{date}You help.{shown}<user>{user}<assistant>{thought}"


def play(program: Program, number: int, make: Make) -> list[tuple[str, str]]:
    """Run a program. Return the predicted beginning of each prompt, and the prompt."""
    run = LearnedRun(program)
    found: list[tuple[str, str]] = []
    for place, name in enumerate(NAMES):
        user = f"{name}, go."
        request = RecordedRequest("http://e", "m", [{"role": "user", "content": user}])
        sent = make(number, place)
        if place and name in run.example:  # There is no link before the first call.
            example = run.example[name]
            forms = run.fields.forms(example.request.fields, example.changes)
            first, *others = (render(form, user) for form in forms)
            certain = min((common_prefix(first, other) for other in others), default=None)
            predicted = first[:certain]
            found.append((predicted, render(sent, user)))
        call = run.begin(name, RecordedRequest(request.url, "m", request.messages, sent))
        run.complete(call, f"What {name} says.")
    run.finish()
    return found


def wrong(program: Program, runs: range, make: Make) -> int:
    """Play runs. Return the number of wrong predictions."""
    found = [each for number in runs for each in play(program, number, make)]
    return sum(not prompt.startswith(predicted) for predicted, prompt in found)


def shuffled(items: Sequence[Any], dice: Random) -> list[Any]:
    return dice.sample(items, len(items))


@given(st.integers(), st.integers(2, 5))
def test_reordered_tools_mispredict_once(seed: int, count: int) -> None:
    dice, tools = Random(seed), [tool(f"look_{number}") for number in range(count)]

    def make(run: int, place: int) -> Fields:
        return {"tools": shuffled(tools, dice), "tool_choice": "auto"}

    program = Program()
    assert wrong(program, range(6), make) <= 1
    # The beginning is predicted, up to the tools.
    run = LearnedRun(program)
    if any(call.changes for call in run.example.values()):
        for predicted, _ in play(program, 6, make):
            assert predicted == "<system>You help."


@given(st.integers())
def test_a_reordered_schema_mispredicts_once(seed: int) -> None:
    dice = Random(seed)

    def make(run: int, place: int) -> Fields:
        parameters = dict(shuffled([*PARAMETERS.items()], dice))
        return {"tools": [tool("look", parameters)]}

    assert wrong(Program(), range(6), make) <= 1


@pytest.mark.parametrize(
    "make",
    [
        lambda run, _: {"chat_template_kwargs": {"date": f"day {run}"}},
        lambda run, _: {"chat_template_kwargs": {"enable_thinking": run % 2 == 0}},
        lambda run, _: {"tools": [tool(f"look_{run}")]},
        lambda run, _: {"tools": [tool("look")]} if run % 2 else {},
    ],
    ids=["a date", "a switch", "other tools", "tools or none"],
)
def test_a_changing_field_mispredicts_once(make: Make) -> None:
    program = Program()
    assert wrong(program, range(2), make) <= len(NAMES) - 1
    assert wrong(program, range(2, 8), make) == 0


def test_fields_of_other_calls_are_predicted() -> None:
    def make(run: int, place: int) -> Fields:
        return {"tools": [tool(f"look_{run}" if place == 1 else "walk")]}

    program = Program()
    found = [play(program, number, make) for number in range(4)][-1]
    assert [predicted == prompt for predicted, prompt in found] == [False, True, True]


def test_a_steady_field_is_predicted_again() -> None:
    def make(run: int, place: int) -> Fields:
        return {"tools": [tool("look" if run < 2 else "walk")]}

    program = Program()
    runs = [play(program, number, make) for number in range(12)]
    assert all(len(predicted) < len(prompt) for predicted, prompt in runs[4])
    assert all(predicted == prompt for predicted, prompt in runs[-1])


def test_another_order_cuts_the_first_run() -> None:
    tools = [tool("look"), tool("walk")]
    fields = ChangingFields()
    fields.compare_order({"tools": tools}, {"tools": tools, "tool_choice": "auto"})
    assert fields.forms({"tools": tools}, {}) == [{"tools": tools}]
    fields.compare_order({"tools": tools}, {})  # An agent may ask its last time without tools.
    assert fields.forms({"tools": tools}, {}) == [{"tools": tools}]
    fields.compare_order({"tools": tools}, {"tools": tools[::-1]})
    first, *others = fields.forms({"tools": tools[::-1], "tool_choice": "auto"}, {})
    assert first["tools"] == tools[::-1]
    assert others == [{"tools": tools, "tool_choice": "auto"}, {}]
