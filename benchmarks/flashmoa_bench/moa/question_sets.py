r"""Read the questions of published sets from local files, and check answers to them.

Nothing is downloaded. A file has a JSON object in each line. A new set is a function in
:data:`SETS`: it gets a line's object and returns the question's text and a check of an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Check = Callable[[str], bool]

_STEPS = "Think step by step, and put the final answer{} in \\boxed{{}}."
_NUMBER_FORM = _STEPS.format(", a number,")
_LETTER_FORM = 'Think step by step, and end with "The answer is (X)", where X is a letter.'
_MARKS = re.compile(r"\\boxed\s*\{|####|\banswer is\b", re.IGNORECASE)
# A repeating model may write thousands of digits, which int() would refuse.
_NUMBER = re.compile(r"(?<![\w.])-?[0-9][0-9,]{0,30}(?:\.[0-9]{1,30})?")
_LETTERS = "ABCDEFGHIJ"
# The last place that the first of these finds has the letter.
_LETTER_MARKS = [
    re.compile(pattern)
    for pattern in (
        r"[Aa]nswer is:?\s*\**\(?([A-J])\b",
        r"\\boxed\s*\{\s*(?:\\text\s*\{)?\(?([A-J])\b",
        r"(?<![\w'])([A-J])(?![\w'])",
    )
]
# AI2's own package, and a package with a copy of its verifiers.
_VERIFIERS = ("ifbench.instructions_registry", "if_verifiable.ifbench.instructions_registry")


@dataclass(frozen=True, slots=True)
class Question:
    """A question with the wanted form of its answer, and a check of answers without thought."""

    number: int
    text: str
    check: Check

    def is_right(self, answer: str | None) -> bool:
        """Return whether an answer is right; its thought up to ``</think>`` does not count."""
        return answer is not None and self.check(answer.rpartition("</think>")[2])


def read(file: Path, name: str) -> list[Question]:
    """Read the questions of a set.

    Raises: ValueError if a line is not in the published form, or its answer cannot be checked.
    """
    questions: list[Question] = []
    for number, row in read_rows(file):
        try:
            questions.append(Question(number, *SETS[name](row)))
        except (KeyError, TypeError, ValueError) as error:
            problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"{file}, line {number}: no row of {name} that can be checked: {problem}"
            ) from error
    if not questions:
        raise ValueError(f"{file} has no questions")
    return questions


def read_rows(file: Path) -> Iterator[tuple[int, Row]]:
    """Yield the objects of a file of JSON lines, by line number from 1; empty lines are left out.

    Raises: ValueError if a line is no JSON object.
    """
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(
                f"{file}, line {number}: not a JSON object; the file needs one in each line"
            )
        yield number, row


def _gsm8k(row: Row) -> tuple[str, Check]:
    question, (_, mark, known) = row["question"], str(row["answer"]).rpartition("####")
    value = find_number(known) if mark else None
    if value is None:
        raise ValueError("its answer does not end with #### and a number")
    return f"{question}\n\n{_NUMBER_FORM}", lambda answer: find_number(answer) == value


def _aime25(row: Row) -> tuple[str, Check]:
    value = find_number(str(row["answer"]))
    if value is None:
        raise ValueError(f"its answer {row['answer']!r} has no number")
    return f"{row['problem']}\n\n{_NUMBER_FORM}", lambda answer: find_number(answer) == value


def _math_500(row: Row) -> tuple[str, Check]:
    parse, verify = _math_verifier()
    known: list[Any] = parse(f"${row['answer']}$")
    if not known:
        raise ValueError(f"its answer {row['answer']!r} cannot be read as LaTeX")
    text = f"{row['problem']}\n\n{_STEPS.format('')}"
    return text, lambda answer: verify(known, parse(answer))


def _mmlu_prox_lite(row: Row) -> tuple[str, Check]:
    given = {letter: row.get(f"option_{place}") for place, letter in enumerate(_LETTERS)}
    options = {letter: text for letter, text in given.items() if text not in (None, "", "N/A")}
    if row["answer"] not in options:
        raise ValueError(f"its answer {row['answer']!r} is the letter of none of its options")
    listed = "\n".join(f"{letter}. {text}" for letter, text in options.items())
    text = f"{row['question']}\n\n{listed}\n\n{_LETTER_FORM}"
    return text, lambda answer: find_letter(answer) == row["answer"]


def _ifbench(row: Row) -> tuple[str, Check]:
    ids, arguments = row["instruction_id_list"], row["kwargs"]
    verifiers = [
        _make_verifier(name, given, row["prompt"])
        for name, given in zip(ids, arguments, strict=True)
    ]
    return row["prompt"], lambda answer: all(_is_followed(each, answer) for each in verifiers)


# The sets, by name. docs/benchmarks.md has each set's file.
SETS: dict[str, Callable[[Row], tuple[str, Check]]] = {
    "gsm8k": _gsm8k,
    "math-500": _math_500,
    "aime25": _aime25,
    "mmlu-prox-lite": _mmlu_prox_lite,
    "ifbench": _ifbench,
}


def find_number(answer: str) -> Fraction | None:
    r"""Return the result of an answer; ``None`` without a number.

    It is the number in the last ``\boxed{}``, or after the last "####" or "answer is", otherwise
    the last number.
    """
    marked = _MARKS.split(answer)
    numbers = _NUMBER.findall(marked[-1])
    if not numbers:
        return None
    return Fraction(numbers[0 if len(marked) > 1 else -1].replace(",", ""))


def find_letter(answer: str) -> str | None:
    r"""Return the chosen option; ``None`` without a letter.

    It is the letter after the last "answer is", otherwise in the last ``\boxed{}``, otherwise the
    last letter that stands alone.
    """
    found = (mark.findall(answer) for mark in _LETTER_MARKS)
    return next((letters[-1] for letters in found if letters), None)


def _math_verifier() -> tuple[Callable[..., list[Any]], Callable[..., bool]]:
    try:
        module: Any = import_module("math_verify")
    except ImportError as error:
        raise ValueError(
            f"LaTeX is compared by math-verify ({error}): pip install 'flashmoa-bench[math]'"
        ) from error
    return module.parse, module.verify


@cache
def _ifbench_verifiers() -> Mapping[str, Any]:
    for name in _VERIFIERS:
        try:
            return import_module(name).INSTRUCTION_DICT
        except ModuleNotFoundError:
            continue
    raise ValueError(
        "its constraints need verifiers: pip install 'flashmoa-bench[ifbench]', or AI2's own "
        "package, ifbench"
    )


def _make_verifier(name: str, given: Row, prompt: str) -> Any:
    """Return the verifier of a constraint. Raises: ValueError if there is none that can run."""
    known = _ifbench_verifiers()
    if name not in known:
        raise ValueError(f"no verifier knows its constraint {name!r}")
    verifier: Any = known[name](name)
    # Rows have all constraints' arguments; the arguments of other constraints are null.
    verifier.build_description(**{key: one for key, one in given.items() if one is not None})
    if "prompt" in (verifier.get_instruction_args() or {}):
        verifier.build_description(prompt=prompt)
    try:
        _is_followed(verifier, "Is this a probe? It has two sentences.")
    except LookupError as error:
        raise ValueError(
            f"the verifier of its constraint {name!r} lacks NLTK's data: python -m nltk.downloader "
            "punkt punkt_tab stopwords averaged_perceptron_tagger_eng"
        ) from error
    return verifier


def _is_followed(verifier: Any, answer: str) -> bool:
    """Return whether an answer follows a constraint, loosely as published.

    It may do so without its first or last line, and without asterisks.

    Raises: LookupError if data of NLTK is missing.
    """
    lines = answer.split("\n")
    cuts: Sequence[Sequence[str]] = (lines, lines[1:], lines[:-1], lines[1:-1])
    texts = (form for cut in cuts for form in ("\n".join(cut), "\n".join(cut).replace("*", "")))
    return any(text.strip() and _passes(verifier, text.strip()) for text in texts)


def _passes(verifier: Any, text: str) -> bool:
    try:
        return bool(verifier.check_following(text))
    except Exception as error:
        # NLTK raises just this class; its subclasses are verifiers' errors at odd answers.
        if type(error) is LookupError:
            raise
        return False
