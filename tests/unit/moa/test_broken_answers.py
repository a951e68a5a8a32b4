"""Answers that end as they should not, and what an agent makes of them."""

from typing import Any

import pytest

from flashmoa.engine import PromptUsage
from flashmoa.errors import RequestRefused
from flashmoa.moa import (
    AgentAnswer,
    Debate,
    Fallback,
    Limits,
    MixtureFailed,
    Model,
    Result,
    Staircase,
    Steps,
)
from flashmoa.moa.serve.chat_completions import error_body
from tests.unit.moa.scripted_engine import Script, mix, scripted_engine

SCRIPTS: dict[str, Script] = {
    "whole": ["It is ", "18."],
    "rest": ["is ", "18."],
    "hung": [("end", "hang")],
    "aborted": ["It ", ("end", "abort")],
    "cut": ["It ", ("end", "cut")],
    "empty": [],
    "begun": ["It is ", ("end", "cut")],
    "long cut": ["9 + ", ("end", "cut")],
    "done": ["It is 18.", ("end", "cut")],
    "long": ["18 ", "or ", "19."],
    "blank": [" ", "\n", " ", "It is 18."],
    "without usage": ["It is ", "18.", ("end", "no usage")],
}


async def ask(first: str, backup: str, **more: Any) -> Result:
    """Ask a mixture whose last agent writes one script, and its backup another."""
    async with (
        scripted_engine({"m": SCRIPTS[first], "whole": SCRIPTS["whole"]}) as (_, client),
        scripted_engine({"m": SCRIPTS[backup]}) as (_, other),
    ):
        last = Model(client, "m", backups=[other], **more)
        return await mix(client, ["whole"], last).answer("?")


@pytest.mark.parametrize(
    ("first", "backup", "more", "problems"),
    [
        ("hung", "whole", {"limits": Limits(30, answer_seconds=1.5)}, ["came within 1.5 s"]),
        ("aborted", "rest", {}, ["aborted its answer"]),
        # An answer with a finish reason is complete.
        ("without usage", "rest", {}, []),
        ("cut", "rest", {"sampling": {"response_format": {"type": "text"}}}, ["cannot be reached"]),
    ],
)
async def test_a_backup_continues_a_broken_answer(
    first: str, backup: str, more: dict[str, Any], problems: list[str]
) -> None:
    result = await ask(first, backup, **more)
    assert (result.text, result.finish_reason) == ("It is 18.", "stop")
    assert result.substitution is None
    for problem, retry in zip(problems, result.final.retries, strict=True):
        assert problem in retry


@pytest.mark.parametrize(
    "form", [{"response_format": {"type": "json_object"}}, {"regex": "It is [0-9]+"}]
)
async def test_an_answer_with_a_grammar_is_not_continued(form: dict[str, Any]) -> None:
    async with scripted_engine(SCRIPTS) as (_, client), scripted_engine(SCRIPTS) as (other, backup):
        last = Model(client, "cut", form, backups=[backup])
        with pytest.raises(MixtureFailed, match="cannot be reached"):
            await mix(client, ["whole"], last).answer("?")
        assert not other.bodies


def test_an_answers_length_is_without_its_thought() -> None:
    usage = PromptUsage(prompt_tokens=5, completion_tokens=100)
    answer = AgentAnswer(0, 0, "m", text="It is 18", thought="x" * 8, usage=usage)
    assert answer.tokens == 50
    answer.thought = ""
    assert answer.tokens == 100
    answer.text = ""
    assert answer.tokens == 0


JSON = {"response_format": {"type": "json_object"}}
REFUSED = {"temperature": -1}


def system(kind: str, proposer: Model, last: Model, **more: Any) -> Any:
    """Make a mixture, staircase or debate whose agents before the last are alike."""
    if kind == "staircase":
        return Staircase([proposer], last, **more)
    if "debate" in kind:
        steps = Steps() if kind == "debate staircase" else None
        return Debate([proposer] * 2, 2, last, staircase=steps, **more)
    return mix(proposer.engine, [proposer], last, **more)


KINDS = pytest.mark.parametrize("kind", ["mixture", "staircase", "debate"])
TAKES_2, TAKES_4 = {"max_tokens": 2}, {"max_tokens": 4}


@KINDS
@pytest.mark.parametrize(
    ("first", "last", "own", "given", "outcome"),
    [
        # Another engine would refuse such a temperature, too.
        ("whole", "rest", {}, REFUSED | TAKES_4, 400),
        ("whole", "rest", REFUSED, {}, "answer"),
        # A refusal with 503 does not come from the client's parameters.
        ("whole", "down", {}, TAKES_4, "answer"),
        # An answer of another form is no substitute.
        ("whole", "cut", {}, JSON, 502),
        ("whole", "cut", JSON, {}, 502),
        ("whole", "cut", {}, {}, "answer"),
        # An answer may be empty if it ends at the client's stop text or number of tokens.
        ("whole", "empty", {}, {"stop": ["It"]}, None),
        ("whole", "empty", {}, {}, "answer"),
        ("long", "blank", {}, TAKES_2, None),
        ("long", "blank", TAKES_2, {}, "answer"),
        # A longer answer than the client asks for is no substitute.
        *(("long", last, {}, TAKES_2, 502) for last in ("down", "empty", "begun")),
        *(("long", last, {}, TAKES_4, "answer") for last in ("down", "empty", "begun")),
        ("long", "down", {}, {"max_completion_tokens": 2}, 502),
    ],
)
async def test_a_client_gets_the_best_answer_of_its_form(
    kind: str, first: str, last: str, own: Any, given: Any, outcome: int | str | None
) -> None:
    """Outcomes are a status, the kind of the substitution, or no substitution."""
    async with scripted_engine(SCRIPTS) as (_, client):
        asked = system(kind, Model(client, first), Model(client, last, own))
        if isinstance(outcome, int):
            with pytest.raises(MixtureFailed) as failure:
                await asked.answer("?", given)
            assert error_body(failure.value)[0] == outcome
            return
        result = await asked.answer("?", given)
    expected = "" if outcome is None else "".join(str(piece) for piece in SCRIPTS[first])
    found = result.substitution
    assert (result.text.strip(), found and found.kind) == (expected, outcome)


@pytest.mark.parametrize("whose", ["fallback", "last", "client"])
async def test_a_grammars_fallback_continues_nothing(whose: str) -> None:
    async with scripted_engine(SCRIPTS) as (engine, client):
        rest = Model(client, "rest", JSON if whose == "fallback" else {})
        last = Model(client, "cut", JSON if whose == "last" else {})
        fallback = Fallback([rest], best_answer=False)
        mixture = system("mixture", Model(client, "whole"), last, fallback=fallback)
        with pytest.raises(MixtureFailed):
            await mixture.answer("?", JSON if whose == "client" else None)
        assert [body["model"] for body in engine.bodies] == ["whole", "cut"]


@KINDS
@pytest.mark.parametrize("stop", ["18", ["never", "18"]])
async def test_the_best_answer_ends_at_the_clients_stop_text(kind: str, stop: Any) -> None:
    async with scripted_engine(SCRIPTS) as (_, client):
        asked = system(kind, Model(client, "whole"), Model(client, "down"))
        result = await asked.answer("?", {"stop": stop})
    assert (result.text, result.finish_reason) == ("It is ", "stop")


async def test_the_best_answer_may_begin_with_the_clients_stop_text() -> None:
    async with scripted_engine(SCRIPTS) as (_, client):
        asked = system("mixture", Model(client, "whole"), Model(client, "long cut"))
        result = await asked.answer("?", {"stop": "It"})
    assert (result.text, result.finish_reason) == ("", "stop")


async def test_a_client_may_replace_a_fallbacks_grammar() -> None:
    async with scripted_engine(SCRIPTS) as (_, client):
        fallback = Fallback([Model(client, "rest", JSON)])
        asked = system("mixture", Model(client, "whole"), Model(client, "cut"), fallback=fallback)
        result = await asked.answer("?", {"response_format": {"type": "text"}})
    assert (result.text, result.substitution.kind) == ("It is 18.", "aggregator")


@KINDS
async def test_a_fallback_continues_within_max_tokens(kind: str) -> None:
    async with scripted_engine(SCRIPTS) as (engine, client):
        last = Model(client, "begun", {"max_tokens": 3})
        fallback = Fallback([Model(client, "long", {"max_tokens": 3})])
        asked = system(kind, Model(client, "whole"), last, fallback=fallback)
        result = await asked.answer("?")
        assert result.substitution.kind == "aggregator" and result.text == "It is 18 or "
        body = engine.bodies[-1]
        # Six characters are about one token.
        assert (body["messages"][-1]["content"], body["max_tokens"]) == ("It is ", 2)


async def test_a_continuation_may_have_nothing_to_add() -> None:
    async with scripted_engine(SCRIPTS) as (_, client):
        fallback = Fallback([Model(client, "empty")])
        asked = system("mixture", Model(client, "rest"), Model(client, "done"), fallback=fallback)
        result = await asked.answer("?")
        assert (result.text, result.substitution.kind) == ("It is 18.", "aggregator")


@pytest.mark.parametrize("kind", ["mixture", "staircase", "debate", "debate staircase", "some"])
async def test_a_question_that_all_refuse_is_a_mistake(kind: str) -> None:
    """It is none if an agent fails otherwise."""
    async with scripted_engine(SCRIPTS) as (_, client):
        refused, last = Model(client, "whole", REFUSED), Model(client, "rest")
        others = mix(client, [refused, "empty"], last)
        asked = others if kind == "some" else system(kind, refused, last)
        with pytest.raises(MixtureFailed) as failure:
            await asked.answer("?")
        assert error_body(failure.value)[0] == (502 if kind == "some" else 400)
        assert kind == "some" or isinstance(failure.value.__cause__, RequestRefused)
