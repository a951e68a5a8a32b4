"""Test reading datasets from files in their published form; the questions are our own."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flashmoa_bench.datasets import NAMES, load

# Math-Verify keeps time by the alarm that pytest-timeout would use.
pytestmark = pytest.mark.timeout(60, method="thread")

Fields = Mapping[str, Any]
GSM8K: Fields = {
    "question": "A hen lays 3 eggs a day. How many in 4 weeks?",
    "answer": "4 weeks are <<4*7=28>>28 days.\n3 x 28 = <<3*28=84>>84\n#### 84",
}
MATH: Fields = {
    "problem": "What is $\\frac12 + \\frac14$?",
    "solution": "$\\boxed{\\frac{3}{4}}$",
    "answer": "\\frac{3}{4}",
    "subject": "Prealgebra",
    "level": 2,
    "unique_id": "test/prealgebra/1.json",
}
CHOICE: Fields = {
    "question_id": 7,
    "question": "Was ist 2 + 2?",
    **{f"option_{number}": None for number in range(10)},
    "option_0": "3",
    "option_1": "4",
    "option_2": "5",
    "answer": "B",
    "answer_index": 1,
    "category": "math",
    "src": "ori",
}
INSTRUCTED: Fields = {
    "key": "12",
    "prompt": "Why is the sky blue? Use four words, and say cat.",
    "instruction_id_list": ["count:words", "keywords:one"],
    "kwargs": [{"N": 4.0, "word": None}, {"N": None, "word": "cat"}],
}


def write_jsonl(folder: Path, *rows: Fields) -> Path:
    file = folder / "test.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def write_parquet(folder: Path, *rows: Fields) -> Path:
    file = folder / "test-00000-of-00001.parquet"
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), file)
    return file


class WordCountChecker:
    """Has the interface of the checkers in IFBench's package."""

    def __init__(self, id: str) -> None:
        self.id = id

    def build_description(self, *, N: float) -> None:
        self.count = int(N)

    def get_instruction_args(self) -> dict[str, Any] | None:
        return None

    def check_following(self, answer: str) -> bool:
        return len(answer.split()) == self.count


class KeywordChecker:
    def __init__(self, id: str) -> None:
        self.arguments: dict[str, Any] = {}

    def build_description(self, *, word: str | None = None, prompt: str | None = None) -> None:
        self.arguments = {"word": word or self.arguments["word"], "prompt": prompt}

    def get_instruction_args(self) -> dict[str, Any]:
        return self.arguments

    def check_following(self, answer: str) -> bool:
        assert self.arguments["prompt"] == INSTRUCTED["prompt"]
        return self.arguments["word"] in [word.strip(".") for word in answer.split()]


class FirstWordChecker(WordCountChecker):
    def check_following(self, answer: str) -> bool:
        return answer.replace("?", "").split()[0] == "Blue"


class CheckerWithoutData(WordCountChecker):
    def check_following(self, answer: str) -> bool:
        raise LookupError("*** Resource punkt_tab not found ***")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """The registry of a fake IFBench package, with our checkers."""
    checkers: dict[str, type] = {
        "count:words": WordCountChecker,
        "keywords:one": KeywordChecker,
        "words:first": FirstWordChecker,
        "words:data": CheckerWithoutData,
    }
    package, module = ModuleType("ifbench"), ModuleType("ifbench.instructions_registry")
    module.INSTRUCTION_DICT = checkers  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ifbench", package)
    monkeypatch.setitem(sys.modules, "ifbench.instructions_registry", module)
    return checkers


SAMPLES: Sequence[tuple[str, Fields]] = [
    ("gsm8k", GSM8K),
    ("math-500", MATH),
    ("aime25", {"problem": "How many?", "answer": "70", "id": "0"}),
    ("mmlu-prox-lite", CHOICE),
    ("ifbench", INSTRUCTED),
]


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(("name", "row"), SAMPLES)
def test_jsonl_and_parquet_hold_the_same_questions(name: str, row: Fields, tmp_path: Path) -> None:
    (first,), (second,) = (
        load(name, write_jsonl(tmp_path, row)),
        load(name, write_parquet(tmp_path, row)),
    )
    assert (first.id, first.question, first.group) == (second.id, second.question, second.group)


def test_gsm8k_is_scored_by_the_final_number(tmp_path: Path) -> None:
    one, two = load("gsm8k", write_jsonl(tmp_path, GSM8K, {**GSM8K, "answer": "#### 1,084"}))
    assert one.question.startswith(GSM8K["question"]) and "\\boxed{}" in one.question
    assert (one.id, two.id, one.group) == ("1", "2", "all")
    answers = (GSM8K["answer"], "\\boxed{84.0}", "28", "")
    assert [one.score(text) for text in answers] == [1, 1, 0, 0]
    assert two.score("So $1,084 in all") == 1
    assert two.score("<think>1,084</think>It is 84.") == 0


def test_math_500_is_grouped_by_level(tmp_path: Path) -> None:
    one, two = load("math-500", write_jsonl(tmp_path, MATH, {**MATH, "level": "Level 5"}))
    assert (one.id, one.group, two.group) == ("test/prealgebra/1.json", "level 2", "level 5")
    answers = (MATH["solution"], "\\boxed{0.75}", "\\boxed{4/3}", "0.75")
    assert [one.score(text) for text in answers] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("row", "id"),
    [
        ({"problem": "How many?", "answer": "70", "id": "0"}, "0"),
        ({"problem_idx": 3, "problem": "How many?", "answer": 70, "problem_type": ["x"]}, "3"),
        ({"question": "How many?", "answer": "70^\\circ"}, "1"),
        ({"Problem": "How many?", "Answer": "070", "ID": "2025-I-1"}, "2025-I-1"),
    ],
    ids=["math-ai", "MathArena", "opencompass", "capitals"],
)
def test_aime_25_is_read_in_several_publishers_forms(row: Fields, id: str, tmp_path: Path) -> None:
    (item,) = load("aime25", write_jsonl(tmp_path, row))
    assert item.id == id and item.question.startswith("How many?\n")
    answers = ("\\boxed{70}", "\\boxed{070}", "The answer is 70.", "\\boxed{7}", "70, I guess")
    assert [item.score(text) for text in answers] == [1, 1, 1, 0, 0]


def test_multiple_choice_is_grouped_by_subject(tmp_path: Path) -> None:
    listed = {**CHOICE, "options": ["3", "4", "5"], "answer": None}
    fields = {name: value for name, value in listed.items() if not name.startswith("option_")}
    items = load("mmlu-prox-lite", write_jsonl(tmp_path, CHOICE, fields))
    assert items[0].question == items[1].question
    assert "\nA. 3\nB. 4\nC. 5\n\n" in items[0].question
    for item in items:
        assert (item.id, item.group) == ("7", "math")
        assert [item.score(f"The answer is ({letter})") for letter in "AB"] == [0, 1]


@pytest.mark.usefixtures("registry")
def test_ifbench_is_scored_loosely_or_strictly(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path, INSTRUCTED)
    (loose,), (strict,) = load("ifbench", file), load("ifbench-strict", file)
    assert (loose.id, loose.question, loose.group) == ("12", INSTRUCTED["prompt"], "2 instructions")
    followed, introduced, long = "It scatters, cat.", "Of course!\nIt scatters, *my* cat.", "x cat"
    assert [strict.score(text) for text in (introduced, long, "  ")] == [0, 0, 0]
    assert [loose.score(text) for text in (introduced, long, "  ")] == [1, 0, 0]
    assert strict.score(f"It {followed}") == loose.score(f"It {followed}") == 1


@pytest.mark.usefixtures("registry")
def test_an_instruction_whose_checker_raises_counts_as_not_followed(tmp_path: Path) -> None:
    row = {**INSTRUCTED, "instruction_id_list": ["words:first"], "kwargs": [{"N": 1}]}
    (item,) = load("ifbench", write_jsonl(tmp_path, row))
    assert [item.score(text) for text in ("?", "Blue?")] == [0, 1]


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"instruction_id_list": ["no:such"]}, "2: 1 instructions, but arguments for 2"),
        ({"instruction_id_list": ["no:such"] * 2}, "no instruction no:such, no:such; update it"),
        ({"instruction_id_list": ["words:data"] * 2, "kwargs": [{"N": 1}] * 2}, "punkt_tab"),
        ({"kwargs": [{"M": 1}, {"word": "cat"}]}, "checkers fail: TypeError"),
    ],
)
def test_ifbench_rows_that_cannot_be_scored_are_refused(
    change: Fields, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=problem):
        load("ifbench", write_jsonl(tmp_path, INSTRUCTED, {**INSTRUCTED, **change}))


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("name", "row", "problem"),
    [
        ("gsm8k", {"q": "?", "answer": "#### 1"}, "no field 'question'; there are q, answer"),
        ("gsm8k", {"question": "?", "answer": "1"}, "does not end with #### and a number"),
        ("math-500", {"problem": "?", "level": 1}, "no field 'answer'; there are problem, level"),
        ("aime25", {"answer": 1}, "no field 'problem' or 'question'"),
        ("aime25", {"problem": "?", "answer": "x"}, "not an integer from 0 to 999: 'x'"),
        ("aime25", {"problem": ["?"], "answer": 1}, "is not a text: \\['\\?'\\]"),
        ("mmlu-prox-lite", {"question": "?", "answer": "A"}, "no field 'options' or 'option_0'"),
        ("mmlu-prox-lite", {**CHOICE, "answer": "D"}, "the answer is D, the options are A, B, C"),
        ("mmlu-prox-lite", {**CHOICE, "answer": "?", "answer_index": 10}, "from A to J: '\\?'"),
        ("ifbench", {"prompt": "?", "kwargs": []}, "no field 'instruction_id_list'"),
    ],
)
def test_a_row_in_another_form_is_refused_with_its_line(
    name: str, row: Fields, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"test.jsonl, line 2: .*{problem}"):
        load(name, write_jsonl(tmp_path, dict(SAMPLES)[name], row))


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.jsonl cannot be read"):
        load("gsm8k", tmp_path / "none.jsonl")
    contents = {
        b"": "has no questions",
        b"\n\n": "has no questions",
        b"{\n": "line 1 is not JSON",
        b"\n[1]\n": "line 2 is not a JSON object",
        b"\xff": "cannot be read",
        b"PAR1 and no more": "is not a Parquet file",
    }
    for content, problem in contents.items():
        (tmp_path / "odd.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match=f"odd.jsonl.* {problem}"):
            load("gsm8k", tmp_path / "odd.jsonl")


def test_an_unknown_dataset_is_refused_with_the_list_of_datasets(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no dataset 'mmlu': gsm8k, math-500"):
        load("mmlu", tmp_path)
    assert NAMES[:5] == tuple(name for name, _ in SAMPLES)


@pytest.mark.parametrize(
    ("name", "row", "package", "advice"),
    [
        (
            "math-500",
            MATH,
            "math_verify",
            "needs math_verify: pip install 'flashmoa-bench\\[datasets\\]'",
        ),
        (
            "gsm8k",
            GSM8K,
            "pyarrow.parquet",
            "needs pyarrow.*: pip install 'flashmoa-bench\\[datasets\\]'",
        ),
        (
            "ifbench",
            INSTRUCTED,
            "ifbench.instructions_registry",
            "IFBench needs .*/allenai/IFBench",
        ),
    ],
)
def test_a_missing_package_is_reported_with_how_to_install_it(
    name: str, row: Fields, package: str, advice: str, tmp_path: Path
) -> None:
    file = (write_parquet if "pyarrow" in package else write_jsonl)(tmp_path, row)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, package, None)
        with pytest.raises(ModuleNotFoundError, match=advice):
            load(name, file)
