"""Test the prompts of debates, and votes."""

from __future__ import annotations

import re
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.engine import EngineClient
from flashmoa.moa import Debate, DebatePrompt, Model, Quorum, Steps
from flashmoa.moa.final_answer import vote
from flashmoa.moa.prompts import AnswerForms
from tests.unit.moa.scripted_engine import Script, scripted_engine

QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]


def last_number(answer: str) -> str | None:
    numbers = re.findall(r"\d+", answer)
    return numbers[-1] if numbers else None


def answer_forms(*answers: str) -> list[AnswerForms]:
    return [AnswerForms(answer, f"[{answer}]") for answer in answers]


def roles(messages: list[dict[str, Any]]) -> list[str]:
    return [message["role"] for message in messages]


def test_own_answer_is_an_assistant_message_and_others_are_in_user_messages() -> None:
    prompt = DebatePrompt("Others:")
    assert prompt.messages(QUESTION, 0, []) == QUESTION
    messages = prompt.messages(QUESTION, 1, [answer_forms("three", "four", "five")])
    assert messages[1:] == [
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "Others:[three][five]"},
    ]
    prompt_of_second = DebatePrompt(staircase_instruction="You are {number}:").on_staircase(1)
    assert (prompt_of_second.layout, prompt_of_second.instruction) == (
        "question-first",
        "You are 2:",
    )
    assert prompt_of_second.title(3) == prompt.title(3) == "\n\nAnswer of debater 3:\n"


def test_memory_keeps_all_rounds_or_the_last_one() -> None:
    rounds = [answer_forms("a", "b"), answer_forms("c", "d")]
    whole = DebatePrompt("Others:").messages(QUESTION, 0, rounds)
    assert roles(whole) == ["user", "assistant", "user", "assistant", "user"]
    # Each prompt begins with the whole prompt of the round before.
    assert whole[:3] == DebatePrompt("Others:").messages(QUESTION, 0, rounds[:1])
    last = DebatePrompt("Others:", memory="last").messages(QUESTION, 0, rounds)
    assert roles(last) == ["user", "assistant", "user"] and last[1]["content"] == "c"


def test_most_common_ballot_wins_and_a_tie_goes_to_the_first() -> None:
    outcome = vote(["it is 4", "", "5", "maybe 5", "none"], last_number)
    assert outcome.ballots == ("4", None, "5", "5", None)
    assert (outcome.winner, outcome.count, outcome.place) == ("5", 2, 2)
    tie = vote(["it is 4", "5", "5 or 4", "5"], last_number)
    assert (tie.winner, tie.place) == ("4", 0)
    without_ballots = vote(["", "well", "?"], last_number)
    assert (without_ballots.winner, without_ballots.count, without_ballots.place) == (None, 0, 1)
    with pytest.raises(ValueError, match="needs an answer"):
        vote(["", ""], last_number)


@given(st.lists(st.sampled_from(["1", "2", "3", "?"]), min_size=1, max_size=9))
def test_winner_has_the_highest_count(answers: list[str]) -> None:
    outcome = vote(answers, last_number)
    counts = {answer: answers.count(answer) for answer in answers if answer != "?"}
    assert outcome.count == max(counts.values(), default=0)
    if outcome.winner is not None:
        assert outcome.count == counts[outcome.winner]
        most_common = [answer for answer in answers if counts.get(answer) == outcome.count]
        assert outcome.winner == most_common[0] == answers[outcome.place]


def test_debate_on_a_staircase_says_for_what_it_needs_one_request() -> None:
    plain = Model(EngineClient("http://127.0.0.1:9"))
    strict = plain.with_sampling({"regex": "[0-9]"})
    form = {"response_format": {"type": "json_object"}, "min_tokens": 0, "stop": ["."]}
    steps = Steps()
    votes = Debate([plain, plain], 2, last_number, staircase=steps)
    assert votes.in_one_request_for() == []
    assert votes.in_one_request_for(form) == ["response_format"]
    assert Debate([strict, plain], 2, plain, staircase=steps).in_one_request_for() == ["regex"]
    assert Debate([plain, plain], 2, strict, staircase=steps).in_one_request_for() == ["regex"]
    # The first round is written in one request in any case, and so is all of a usual debate.
    alone = Debate([strict, plain], 1, last_number, staircase=steps)
    assert alone.in_one_request_for(form) == []
    assert Debate([strict, plain], 2, last_number).in_one_request_for(form) == []


def test_debate_needs_two_debaters_and_a_round() -> None:
    model = Model(EngineClient("http://127.0.0.1:9"))
    with pytest.raises(ValueError, match="at least two debaters; there are 1"):
        Debate([model], 2, last_number)
    with pytest.raises(ValueError, match="at least one round; rounds is 0"):
        Debate([model, model], 0, last_number)


@pytest.mark.anyio
@pytest.mark.parametrize("staircase", [None, Steps()])
async def test_vote_waits_for_a_quorum_of_the_last_round(staircase: Steps | None) -> None:
    scripts: dict[str, Script] = {"quick": ["It is ", "4."], "hung": ["It ", ("end", "hang")]}
    async with scripted_engine(scripts) as (_, client):
        debaters = [Model(client, name) for name in ("quick", "hung", "quick")]
        debate = Debate(debaters, 2, last_number, staircase=staircase, quorum=Quorum(2, 0.0))
        with anyio.fail_after(20):
            result = await debate.answer("What is 2 + 2?")
    assert result.text == "It is 4." and result.vote is not None
    assert result.vote.ballots == ("4", None, "4")
    assert [answer.status for answer in result.layers[-1]] == ["used", "left out", "used"]


@pytest.mark.anyio
async def test_streamed_vote_asks_for_each_ballot_once() -> None:
    asked: list[str] = []

    def extract(answer: str) -> str:
        asked.append(answer)
        return answer

    async with scripted_engine({"default": ["4"]}) as (_, client):
        debate = Debate([Model(client)] * 2, 1, extract)
        async with debate.answering("What is 2 + 2?") as run:
            pieces = [piece async for piece in run]
            result = await run.result()
    assert pieces == [result.text] == ["4"] and asked == ["4", "4"]
