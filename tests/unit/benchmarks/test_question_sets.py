"""Test how ``flashmoa bench moa-accuracy`` reads published sets, and checks answers."""

import json
from collections.abc import Generator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_bench.moa import question_sets
from flashmoa_bench.moa.question_sets import Question, find_letter, find_number, read

# A row of each set in its published form, right answers and wrong answers.
ROWS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "gsm8k": (
        {"question": "Why?", "answer": "6 x 7\n#### 1,042"},
        ["So \\boxed{1042}.", "<think>\\boxed{7}</think>The answer is 1,042."],
        ["\\boxed{42}", "No idea.", "<think>\\boxed{1042}</think>It is 1."],
    ),
    "aime25": (
        {"problem": "Why?", "answer": "70", "id": "0"},
        ["\\boxed{70}", "\\boxed{070}"],
        ["\\boxed{71}"],
    ),
    "mmlu-prox-lite": (
        {
            "question_id": 1, "question": "Why?", "option_0": "this", "option_1": "that",
            "option_2": None, "option_9": None, "answer": "B", "answer_index": 1,
        },
        ["A fits, but the answer is (B).", "The answer is **B**", "\\boxed{\\text{B}}", "B"],
        ["The answer is (A).", "Both", "The answer is (J)."],
    ),
}  # fmt: skip


def write(folder: Path, *rows: object) -> Path:
    file = folder / "set.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return file


@pytest.mark.parametrize("name", list(ROWS))
def test_answers_to_a_published_row_are_checked(name: str, tmp_path: Path) -> None:
    row, right, wrong = ROWS[name]
    [question] = read(write(tmp_path, row), name)
    assert question.text.startswith("Why?\n\n") and question.number == 1
    assert all(question.is_right(answer) for answer in right)
    assert not any(question.is_right(answer) for answer in [*wrong, None])


def test_options_are_listed_with_their_letters(tmp_path: Path) -> None:
    [question] = read(write(tmp_path, ROWS["mmlu-prox-lite"][0]), "mmlu-prox-lite")
    assert question.text.startswith("Why?\n\nA. this\nB. that\n\nThink step by step")


@pytest.mark.parametrize(
    ("name", "row", "problem"),
    [
        ("gsm8k", {"q": "?", "answer": "#### 1"}, "it has no 'question'"),
        ("gsm8k", {"question": "?", "answer": "4"}, "does not end with #### and a number"),
        ("gsm8k", {"question": "?", "answer": 4}, "does not end with #### and a number"),
        ("aime25", {"problem": "?", "answer": "many"}, "its answer 'many' has no number"),
        ("mmlu-prox-lite", {"question": "?", "option_0": "a", "answer": "B"}, "letter of none"),
        ("ifbench", {"prompt": "?", "instruction_id_list": []}, "no 'kwargs'"),
        ("math-500", {"question": "?", "answer": "1"}, "no 'problem'|flashmoa-bench.math"),
    ],
)
def test_other_rows_are_refused(
    name: str, row: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    good = [ROWS[name][0]] if name in ROWS else []
    where = f"line {len(good) + 1}: no row of {name} that can be checked: "
    with pytest.raises(ValueError, match=f"{where}.*({problem})"):
        read(write(tmp_path, *good, row), name)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("\n{", "line 2: not a JSON object"),
        ("[]", "line 1: not a JSON object"),
        ("3", "line 1: not a JSON object"),
        ("\n", "has no questions"),
    ],
)
def test_files_without_an_object_in_each_line_are_refused(
    text: str, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=problem):
        read(file, "gsm8k")


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("3 x 4 = 12, so \\boxed{12} apples in 2 bags.", "12"),
        ("\\boxed{1} at first, but no: \\boxed{\\$1,234.50}", "1234.50"),
        ("2 + 2 = 4\n#### -4", "-4"),
        ("The answer is **42**. I am sure, by 99 %.", "42"),
        ("First 7 of them, then 9.", "9"),
        ("\\boxed{many}", None),
        ("No idea.", None),
        # More digits than int() takes.
        ("1" * 9000, "1" * 31),
    ],
)
def test_a_marked_number_is_the_result_or_the_last(answer: str, number: str | None) -> None:
    assert find_number(answer) == (None if number is None else Fraction(number))


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("The answer is (C). The answer is (D).", "D"),
        ("Answer is: E", "E"),
        ("\\boxed{F} at last", "F"),
        ("Neither A nor B, so H", "H"),
        ("I'd say it's A", "A"),
        ("The answer is Because", None),
        ("The answer is (X).", None),
    ],
)
def test_a_marked_letter_is_the_choice_or_the_last(answer: str, letter: str | None) -> None:
    assert find_letter(answer) == letter


@pytest.mark.parametrize(
    ("known", "answer", "is_right"),
    [
        ("\\frac{1}{2}", "So it is \\boxed{0.5}.", True),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\boxed{(3, \\pi/2)}", True),
        ("p - q", "\\boxed{-q+p}", True),
        ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}", True),
        ("9", "\\boxed{10}", False),
        ("9", "No idea.", False),
    ],
)
def test_latex_is_compared_by_its_value(
    known: str, answer: str, is_right: bool, tmp_path: Path
) -> None:
    pytest.importorskip("math_verify")
    row = {"problem": "Why?", "solution": "", "answer": known, "level": 1, "unique_id": "1"}
    [question] = read(write(tmp_path, row), "math-500")
    assert question.text.endswith("put the final answer in \\boxed{}.")
    assert question.is_right(answer) == is_right


class Words:
    """A verifier with the interface of IFBench's: an answer must have some number of words."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.given: dict[str, Any] = {}

    def build_description(self, **given: Any) -> None:
        self.given |= given

    def get_instruction_args(self) -> dict[str, Any]:
        return {"N": None, **({"prompt": None} if self.name == "count:prompt" else {})}

    def check_following(self, text: str) -> bool:
        if "nltk" in self.given:
            raise LookupError("\n***** Resource punkt not found")
        if "odd" in text:
            raise IndexError("odd")
        return len(text.split()) == self.given["N"]


@pytest.fixture
def verifiers(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    registry = SimpleNamespace(INSTRUCTION_DICT={"count:words": Words, "count:prompt": Words})

    def load(name: str) -> Any:
        if name.startswith("ifbench"):
            raise ModuleNotFoundError(name)
        return registry

    monkeypatch.setattr(question_sets, "import_module", load)
    question_sets._ifbench_verifiers.cache_clear()
    yield
    question_sets._ifbench_verifiers.cache_clear()


def constrained(*names: str, **given: Any) -> dict[str, Any]:
    return {
        "key": "1",
        "prompt": "Write.",
        "instruction_id_list": [*names],
        "kwargs": [{"N": 2, "other": None, **given} for _ in names],
    }


@pytest.mark.usefixtures("verifiers")
def test_all_constraints_must_be_followed_at_least_loosely(tmp_path: Path) -> None:
    row = constrained("count:words", "count:prompt")
    [question] = read(write(tmp_path, row), "ifbench")
    assert question.text == "Write."
    for answer in ("two words", "Here it is:\ntwo words", "two words\nBye.", "* two\nwords"):
        assert question.is_right(answer)
    assert not question.is_right("one") and not question.is_right("a\nb c\nd e f\ng")
    # A verifier that fails at an odd answer does not end a long run.
    assert not question.is_right("odd word")
    row["kwargs"][1]["N"] = 3
    [question] = read(write(tmp_path, row), "ifbench")
    assert not question.is_right("two words")


@pytest.mark.usefixtures("verifiers")
@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (constrained("count:verses"), "no verifier knows its constraint 'count:verses'"),
        (constrained("count:words", nltk=True), "'count:words' lacks NLTK's data: python -m nltk"),
    ],
)
def test_constraints_that_cannot_be_verified_are_refused(
    row: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=problem):
        read(write(tmp_path, row), "ifbench")


def test_without_verifiers_their_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(question_sets, "import_module", load)
    question_sets._ifbench_verifiers.cache_clear()
    row = {"problem": "?", "answer": "1"}
    for name, given in (("ifbench", constrained("count:words")), ("math-500", row)):
        with pytest.raises(ValueError, match=r"pip install 'flashmoa-bench\["):
            read(write(tmp_path, given), name)


def test_a_question_is_wrong_without_an_answer() -> None:
    assert not Question(1, "", lambda _: True).is_right(None)
