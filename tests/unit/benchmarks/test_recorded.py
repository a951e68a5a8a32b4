"""Test recorded answers, and the scripts of questions that are made from them."""

import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import anyio
import pytest
from flashmoa_bench.moa.rig import ReplayedEmbedder, ScriptOptions, write_script
from flashmoa_bench.recorded import (
    FILE,
    SIZES,
    RecordedQuestion,
    load_agents,
    load_recorded,
    spread,
    trace,
    unpack,
)
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from flashmoa.observe import CallFinished

MODELS = {"small": ("a", "b"), "medium": ("c",), "large": ("d",)}
QUESTION = RecordedQuestion(
    7,
    30,
    {"small": [10, 20], "medium": [100], "large": [300]},
    {(0, 1): 0.5, (0, 2): 0.6, (0, 3): 0.7, (1, 2): 0.8, (1, 3): 0.9, (2, 3): 1.0},
)
TREE = (["small", "medium", "large"] * 2, ["small", "large"], ["large"])


def test_answers_are_found_by_size_and_draw() -> None:
    row = [7, 30, [10, 20, 100, 300], [500, 600, 700, 800, 900, 1000]]
    assert unpack(row, MODELS) == QUESTION
    assert [QUESTION.length("small", draw) for draw in range(3)] == [10, 20, 10]
    assert QUESTION.similarity(("large", 0), ("small", 1)) == 0.9
    assert QUESTION.similarity(("small", 3), ("medium", 5)) == 0.8
    assert QUESTION.similarity(("large", 0), ("large", 1)) == fmean(QUESTION.similarities.values())


def test_the_recorded_sets_are_whole() -> None:
    assert FILE.stat().st_size < 200_000
    for recorded in load_recorded().values():
        assert tuple(recorded.models) == SIZES
        assert len(recorded.questions) >= 100
        for question in recorded.questions:
            assert min(map(min, question.lengths.values())) > 0
            assert all(0 < value <= 1 for value in question.similarities.values())


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40), st.integers(1, 40))
def test_a_few_questions_are_spread_by_length(lengths: list[int], count: int) -> None:
    questions = [
        RecordedQuestion(number, 1, {"small": [length]}, {})
        for number, length in enumerate(lengths)
    ]
    chosen = spread(questions, count)
    assert len(chosen) == min(count, len(lengths)) == len({each.number for each in chosen})
    # The first question is the median of the chosen ones.
    ranks = sorted(each.lengths["small"][0] for each in chosen)
    assert chosen[0].lengths["small"][0] == ranks[len(ranks) // 2]


def test_agents_have_their_sizes_lengths() -> None:
    script = write_script(QUESTION, TREE, ScriptOptions(scale=0.5, longest=100))
    tokens = {name: agent.tokens for name, agent in script.agents.items()}
    first = {"1.1": 5, "1.2": 50, "1.3": 100, "1.4": 10, "1.5": 50, "1.6": 100}
    assert tokens == first | {"2.1": 10, "2.2": 100, "3.1": 100}
    assert script.prompt == 15
    equal = write_script(QUESTION, TREE, ScriptOptions(equal=64, last_tokens=1))
    assert [agent.tokens for agent in equal.agents.values()] == [64] * 8 + [1]
    later = write_script(QUESTION, TREE, ScriptOptions(scale=0.5, longest=100, later_tokens=7))
    lengths = {name: agent.tokens for name, agent in later.agents.items()}
    assert lengths == first | dict.fromkeys(("2.1", "2.2", "3.1"), 7)


def test_confidences_depend_on_agent_and_seed() -> None:
    def draw(seed: int) -> list[float]:
        agents = write_script(QUESTION, TREE, ScriptOptions(seed=seed)).agents
        return [each.confidence for each in agents.values()]

    drawn = draw(3)
    assert drawn == draw(3) and len(set(drawn)) == len(drawn) and draw(4)[0] != drawn[0]
    assert fmean(drawn) == pytest.approx(0.85, abs=0.1) and all(0 < value < 1 for value in drawn)


def test_answers_are_as_similar_as_recorded() -> None:
    embedded: list[int] = []

    def take(tokens: int) -> float:
        embedded.append(tokens)
        return 0.0

    async def compare() -> list[list[float]]:
        embedder = ReplayedEmbedder(write_script(QUESTION, TREE, ScriptOptions()), take)
        for agent in ("1.1", "1.2"):
            embedder(CallFinished(agent=agent, engine="", call_id=agent, text=f"text of {agent}"))
        return await embedder.compare(["text of 1.1", "text of 1.2"])

    assert anyio.run(compare) == [[1.0, 0.6], [0.6, 1.0]]
    assert embedded == [110]


def test_recorded_turns_continue_each_other() -> None:
    agents = load_agents()
    assert len(agents) == 24 and [len(agent) for agent in agents] == sorted(map(len, agents))
    for agent in agents:
        for turn, later in pairwise(agent):
            assert turn.prompt + turn.answer + turn.result == later.prompt
            assert turn.answer > 0 and turn.result > 0 and turn.gap >= 0


def test_a_trace_adds_the_recorded_tokens(model: Path, tmp_path: Path) -> None:
    trace.main([str(model), str(tmp_path / "trace.json"), "--agents", "25"])
    conversations = json.loads((tmp_path / "trace.json").read_text())["conversations"]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert len(conversations) == 25 and conversations[24] != conversations[0]
    for turns, recorded in zip(conversations, [*load_agents(), load_agents()[0]], strict=True):
        assert len(turns) == len(recorded)
        texts = [message["content"] for turn in turns[:4] for message in turn["messages"]]
        added = [recorded[0].prompt, *(turn.result for turn in recorded[:3])]
        lengths = [len(tokenizer.encode(text).ids) for text in texts]
        # The first word has no space before it.
        assert lengths == pytest.approx(added, abs=4)


def test_agents_for_aiperf_wait_for_their_tools(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "agents.jsonl"
    trace.main([str(model), str(file), "--aiperf", "--agents", "3", "--turns", "4", "--scale", "2"])
    sessions = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({each["session_id"] for each in sessions}) == 3
    for each in sessions:
        [recorded] = [
            agent for agent in load_agents()
            if [turn["delay"] for turn in each["turns"]]
            == [0.0, *(turn.gap * 1000 / 2 for turn in agent[:4])][: len(each["turns"])]
        ]  # fmt: skip
        answers = [round(turn.answer / 2) for turn in recorded[:4]]
        # With the call of its tool, an answer is a few tokens longer than its words.
        words = [int(turn["extra"]["regex"].split("{")[-1].split("}")[0]) for turn in each["turns"]]
        assert words == [max(1, answer - 12) for answer in answers]
