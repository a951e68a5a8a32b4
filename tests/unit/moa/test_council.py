"""Councils: members rank the answers, a judge compares them, and a chairman reads everything."""

import json
from collections.abc import Sequence
from itertools import permutations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flashmoa.engine import EngineClient
from flashmoa.moa import AgentAnswer, Council, Model
from flashmoa.moa.config import read_tables
from flashmoa.moa.council import count_places
from tests.unit.moa.scripted_engine import Script, scripted_engine

ORDER = [2, 1, 3]
COMPARISON = {"consensus": ["It is even."], "contradictions": ["18 or 19."], "blind_spots": []}
QUESTION: list[Any] = [{"role": "user", "content": "What is 9 + 9?"}]


def ranking(numbers: Sequence[int]) -> list[str]:
    return [json.dumps({"remarks": ["Well."], "ranking": numbers})]


SCRIPTS: dict[str, Script] = {
    "a": ["It is 17."], "a review": ranking(ORDER),
    "b": ["It is 18."], "b review": ranking([3, 2, 1]),
    "c": ["It is 19."], "c review": ranking([2, 2, 1]),
    "broken": [("end", "cut")], "mute review": ["I like all."], "mute": ["It is 20."],
    "chair": ["It is ", "18."], "chair comparison": [json.dumps(COMPARISON)],
    "other comparison": ["{}"],
}  # fmt: skip


def council(client: EngineClient, *members: str, chairman: str = "chair", **more: Any) -> Council:
    return Council([Model(client, name) for name in members], Model(client, chairman), **more)


async def test_the_chairman_reads_answers_rankings_and_the_comparison() -> None:
    async with scripted_engine(SCRIPTS) as (engine, client):
        asked = council(client, "a", "b", "c")
        result = await asked.answer(QUESTION)
        verdict = asked.verdict(result)
    assert result.text == "It is 18." and result.final.name == "3.1"
    # The ranking of c names an answer twice and another not at all, so it does not count.
    found = [(one["agent"], one["mean_place"], one["votes"]) for one in verdict["ranking"]]
    assert found == [("1.2", 1.5, 2), ("1.3", 2.0, 2), ("1.1", 2.5, 2)]
    assert verdict["comparison"] == COMPARISON
    reviews = [body for body in engine.bodies if "response_format" in body]
    prompts = {json.dumps(body["messages"][:-1]) for body in reviews}
    assert len(reviews) == 4 and len(prompts) == 1
    asks = [body["messages"][-1]["content"] for body in reviews]
    answers = [f"\n\nAnswer {number}:\nIt is {16 + number}." for number in (1, 2, 3)]
    shared = f"What is 9 + 9?{''.join(answers)}\n\n"
    assert all(text.startswith(shared) for text in asks) and len(set(asks)) == 2
    # Nothing in a review's prompt names a model.
    assert not any(f'"{name}"' in json.dumps(reviews[0]["messages"]) for name in SCRIPTS)
    read = engine.bodies[-1]["messages"][-1]["content"]
    for text in ("Answer 2:\nIt is 18.", "Ranking 2:\n{", "Comparison:\n{", "It is even."):
        assert text in read
    assert "response_format" not in engine.bodies[-1]


async def test_reviewers_do_not_advise_and_answers_have_the_files_heading() -> None:
    async with scripted_engine(SCRIPTS) as (engine, _):
        named = [{"engine": engine.url, "model": name} for name in ("a", "b", "chair")]
        models = [{"models": named[:2]}, {"models": named[2:]}]
        [served] = read_tables({"kind": "council", "heading": "\n\n[{number}] ", "layers": models})
        tools = [{"type": "function", "function": {"name": "f"}}]
        await served.system.answer(QUESTION, {"tools": tools})
        await served.close()
    reviews = [body for body in engine.bodies if "response_format" in body]
    assert len(reviews) == 3
    assert all("[2] It is 18." in body["messages"][-1]["content"] for body in reviews)
    advises = ["You advise" in str(body["messages"]) for body in engine.bodies]
    assert advises == [True, True, False, False, False, False]
    assert "[2] It is 18." in engine.bodies[-1]["messages"][-1]["content"]


async def test_reviews_that_fail_do_not_count() -> None:
    async with scripted_engine(SCRIPTS) as (_, client):
        judge = Model(client, "other", {})
        asked = council(client, "b", "broken", "mute", judge=judge)
        result = await asked.answer(QUESTION)
        verdict = asked.verdict(result)
    assert [one.status for one in result.layers[0]] == ["used", "failed", "used"]
    # Number 2 in the ranking of b has failed, and is left out.
    found = [(one["agent"], one["mean_place"], one["votes"]) for one in verdict["ranking"]]
    assert found == [("1.3", 1, 1), ("1.1", 2, 1)] and verdict["comparison"] is None


async def test_without_a_chairman_an_answer_is_the_result_and_no_review() -> None:
    async with scripted_engine(SCRIPTS) as (_, client):
        result = await council(client, "a", "b", chairman="broken").answer(QUESTION)
    assert result.text == "It is 17." and result.substitution is not None
    assert result.substitution.agent == "1.1"


@given(st.integers(1, 4).flatmap(lambda n: st.lists(
    st.sampled_from(list(permutations(range(1, n + 1)))) | st.lists(st.integers(-1, 6)), max_size=4
).map(lambda votes: (n, votes))))  # fmt: skip
def test_places_are_the_mean_of_whole_rankings(given: tuple[int, list[Sequence[int]]]) -> None:
    count, votes = given
    answers = [AgentAnswer(0, place, "m", text="x", finished=1.0) for place in range(count)]
    found = count_places(votes, answers)
    firsts = [list(dict.fromkeys(n for n in vote if 1 <= n <= count)) for vote in votes]
    whole = [vote for vote in firsts if sorted(vote) == list(range(1, count + 1))]
    for answer, places in found:
        assert places == [vote.index(answer.place + 1) + 1 for vote in whole]
    means = [sum(places) / len(places) for _, places in found if places]
    assert means == sorted(means)
    assert sorted(answer.place for answer, _ in found) == list(range(count))
