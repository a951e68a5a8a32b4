"""Test the prompts and the quorums of debates."""

from typing import Any

import anyio
import pytest

from flashmoa.engine import EngineClient
from flashmoa.moa import Debate, DebatePrompt, Model, Quorum, Steps
from tests.unit.moa.scripted_engine import Script, scripted_engine

QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]


def answer_forms(*answers: str) -> list[tuple[str, str]]:
    return [(answer, f"[{answer}]") for answer in answers]


def roles(messages: list[dict[str, Any]]) -> list[str]:
    return [message["role"] for message in messages]


def test_own_answers_are_assistant_messages() -> None:
    prompt = DebatePrompt("Others:")
    assert prompt.for_reader(QUESTION, 0, []) == QUESTION
    messages = prompt.for_reader(QUESTION, 1, [answer_forms("three", "four", "five")])
    assert messages[1:] == [
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "Others:[three][five]"},
    ]
    second = DebatePrompt(staircase_instruction="You are {number}:").on_staircase(1)
    assert (second.layout, second.instruction) == ("question-first", "You are 2:")
    assert second.title(3) == prompt.title(3) == "\n\nAnswer of debater 3:\n"


def test_memory_keeps_all_rounds_or_the_last_one() -> None:
    rounds = [answer_forms("a", "b"), answer_forms("c", "d")]
    whole = DebatePrompt("Others:").for_reader(QUESTION, 0, rounds)
    assert roles(whole) == ["user", "assistant", "user", "assistant", "user"]
    # Each prompt begins with the whole prompt of the previous round.
    assert whole[:3] == DebatePrompt("Others:").for_reader(QUESTION, 0, rounds[:1])
    last = DebatePrompt("Others:", memory="last").for_reader(QUESTION, 0, rounds)
    assert roles(last) == ["user", "assistant", "user"] and last[1]["content"] == "c"


def test_a_staircase_names_what_needs_one_request() -> None:
    plain = Model(EngineClient("http://127.0.0.1:9"))
    strict = plain.with_sampling({"regex": "[0-9]"})
    form = {"response_format": {"type": "json_object"}, "min_tokens": 0, "stop": ["."]}
    steps = Steps()
    debate = Debate([plain, plain], 2, plain, staircase=steps)
    assert debate.in_one_request_for() == []
    assert debate.in_one_request_for(form) == ["response_format"]
    assert Debate([strict, plain], 2, plain, staircase=steps).in_one_request_for() == ["regex"]
    assert Debate([plain, plain], 2, strict, staircase=steps).in_one_request_for() == ["regex"]
    # The first round and all rounds without a staircase are written in one request in any case.
    assert Debate([strict, plain], 1, plain, staircase=steps).in_one_request_for() == []
    assert Debate([strict, plain], 2, plain).in_one_request_for(form) == []


@pytest.mark.parametrize("staircase", [None, Steps()])
async def test_each_round_waits_for_a_quorum(staircase: Steps | None) -> None:
    scripts: dict[str, Script] = {"quick": ["It is ", "4."], "hung": ["It ", ("end", "hang")]}
    async with scripted_engine(scripts) as (_, client):
        debaters = [Model(client, name) for name in ("quick", "hung", "quick")]
        debate = Debate(debaters, 2, debaters[0], staircase=staircase, quorum=Quorum(2, 0.0))
        with anyio.fail_after(20):
            result = await debate.answer("What is 2 + 2?")
    assert result.text == "It is 4."
    # On a staircase, the text of an agent that has begun is read.
    hung = "left out" if staircase is None else "used"
    for round_ in result.layers[:2]:
        assert [answer.status for answer in round_] == ["used", hung, "used"]


async def test_leaving_does_not_wait_for_a_quorum() -> None:
    async with scripted_engine({"hung": ["It ", ("end", "hang")]}) as (_, client):
        model = Model(client, "hung")
        debate = Debate([model, model], 2, model, staircase=Steps(), quorum=Quorum(1, 3600))
        with anyio.fail_after(20):
            async with debate.answering("What is 2 + 2?") as run:
                await run.agents[0].asked.wait()
