r"""GSM8K, MATH-500 and AIME 2025: problems with numbers or formulas as answers.

GSM8K (openai/gsm8k): {question, answer}; an answer ends with "#### 42". MATH-500
(HuggingFaceH4/MATH-500): {problem, answer, level, unique_id}. AIME 2025 has several publishers:
math-ai/aime25, MathArena/aime_2025, yentinglin/aime_2025 {problem, answer} and opencompass/AIME2025
{question, answer}.

Formulas are compared by Math-Verify (huggingface/Math-Verify). It reads LaTeX into SymPy: 14/3 is
``\dfrac{14}{3}``, ``\sqrt{117}`` is ``3\sqrt{13}``, 1, -2 is -2, 1. It is lenient in places: 10 and
``10\%`` are the same, and so are 2516 and 2516_8.
"""

from __future__ import annotations

import re
import threading
from typing import Any

from flashmoa_bench.datasets.answers import boxed, final_number, numbers, stated, without_thoughts
from flashmoa_bench.datasets.files import Item, PublishedRow, package

_NUMBER_FORM = "Think step by step, and put the final answer, a number, in \\boxed{}."
_FORM = "Think step by step, and put the final answer in \\boxed{}."
_INTEGER_FORM = "Think step by step, and put the final answer, an integer, in \\boxed{}."
# opencompass has an angle as 336^\circ.
_AIME_ANSWER = re.compile(r"0*([0-9]{1,3})(?:\^\{?\\circ\}?)?")
# Seconds for reading an answer, and for comparing: \boxed{9^{9^{9^9}}} would take forever.
_TIMEOUT = 5
_TEXT = re.compile(r"\\(?:text|mbox|textbf|mathrm|textrm)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[,;:! ]|[$]")
# Between two words or numbers a space stays: 1 2 is not 12.
_SPACES = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")


def read_gsm8k(row: PublishedRow) -> Item:
    """Read a row of GSM8K.

    Raises: ValueError if its answer is not in the published form.
    """
    _, marked, after = row.text("answer").rpartition("####")
    if not marked or len(known := numbers(after)) != 1:
        raise row.wrong("field 'answer' does not end with #### and a number")

    def score(answer: str) -> float:
        return float(final_number(without_thoughts(answer)) == known[0])

    return Item(row.id, f"{row.text('question')}\n\n{_NUMBER_FORM}", "all", score)


def read_math(row: PublishedRow) -> Item:
    """Read a row of MATH-500.

    Raises: ValueError if a field is missing, ModuleNotFoundError without Math-Verify.
    """
    level = row.get("level")
    group = "all" if level is None else f"level {str(level).removeprefix('Level ')}"
    return _item(row, _FORM, row.text("answer"), group)


def read_aime(row: PublishedRow) -> Item:
    """Read a row of AIME 2025.

    Raises: ValueError if its answer is no integer from 0 to 999, ModuleNotFoundError without Math-
    Verify.
    """
    answer = row.text("answer").strip()
    known = _AIME_ANSWER.fullmatch(answer)
    if known is None:
        raise row.wrong(f"field 'answer' is no integer from 0 to 999: {answer!r}")
    return _item(row, _INTEGER_FORM, known[1], "all")


def _item(row: PublishedRow, form: str, known: str, group: str) -> Item:
    check_installed()

    def score(answer: str) -> float:
        return float(says(without_thoughts(answer), known))

    return Item(row.id, f"{row.text('problem', 'question')}\n\n{form}", group, score)


def check_installed() -> None:
    """Check that Math-Verify is installed.

    Raises: ModuleNotFoundError, which says what to install.
    """
    _math_verify()


def says(answer: str, known: str) -> bool:
    r"""Tell whether what ``answer`` has in ``\boxed{}``, or says the answer is, equals ``known``.

    To be called in the main thread: elsewhere nothing can end a comparison that takes forever.
    """
    given = boxed(answer)
    if given is None:
        if not (statements := stated(answer)):
            return False
        given = statements[0]
        answer = f"The answer is {given}"
    # Math-Verify is given the whole text: two boxes, \boxed{1} and \boxed{-2}, are one answer.
    return _tidy(given) == _tidy(known) or _verified(answer, known)


def _tidy(latex: str) -> str:
    return _SPACES.sub("", _SPACING.sub("", _TEXT.sub(r"\1", latex)).strip()).rstrip(".")


def _verified(answer: str, known: str) -> bool:
    library = _math_verify()
    forms = (
        library.LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),
        library.ExprExtractionConfig(try_extract_without_anchor=False),
    )
    # It keeps time by an alarm, which only the main thread can set.
    seconds = _TIMEOUT if threading.current_thread() is threading.main_thread() else None

    def read(text: str) -> Any:
        return library.parse(text, forms, parsing_timeout=seconds)

    known = f"\\boxed{{{known}}}"
    return bool(library.verify(read(known), read(answer), timeout_seconds=seconds))


def _math_verify() -> Any:
    return package("math_verify", "comparing mathematical answers")
