r"""Read GSM8K, MATH-500 and AIME 2025: problems with numbers or formulas as answers.

GSM8K (openai/gsm8k): {question, answer}; an answer ends with "#### 42". MATH-500
(HuggingFaceH4/MATH-500): {problem, answer, level, unique_id}. AIME 2025 has several publishers:
math-ai/aime25, MathArena/aime_2025, yentinglin/aime_2025 {problem, answer} and opencompass/AIME2025
{question, answer}.

Formulas are compared by Math-Verify (huggingface/Math-Verify), which parses LaTeX with SymPy: 14/3
equals ``\dfrac{14}{3}``, ``\sqrt{117}`` equals ``3\sqrt{13}``, and "1, -2" equals "-2, 1". It is
lenient in places: 10 equals ``10\%``, and 2516 equals 2516_8.
"""

from __future__ import annotations

import re
import threading
from typing import Any

from flashmoa_bench.datasets.answers import (
    find_box,
    find_final_number,
    find_numbers,
    find_statements,
    without_thoughts,
)
from flashmoa_bench.datasets.files import Item, PublishedRow, import_package

_NUMBER_FORM = "Think step by step, and put the final answer, a number, in \\boxed{}."
_FORM = "Think step by step, and put the final answer in \\boxed{}."
_INTEGER_FORM = "Think step by step, and put the final answer, an integer, in \\boxed{}."
# opencompass writes an angle as 336^\circ.
_AIME_ANSWER = re.compile(r"0*([0-9]{1,3})(?:\^\{?\\circ\}?)?")
# Seconds for parsing an answer, and for comparing it: \boxed{9^{9^{9^9}}} would never end.
_TIMEOUT = 5
_TEXT = re.compile(r"\\(?:text|mbox|textbf|mathrm|textrm)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[,;:! ]|[$]")
# Spaces between two words or numbers are kept: 1 2 is not 12.
_SPACES = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")


def read_gsm8k(row: PublishedRow) -> Item:
    """Read a row of GSM8K.

    Raises: ValueError if its answer is not in the published form.
    """
    _, mark, after = row.text("answer").rpartition("####")
    if not mark or len(known := find_numbers(after)) != 1:
        raise row.error("field 'answer' does not end with #### and a number")

    def score(answer: str) -> float:
        return float(find_final_number(without_thoughts(answer)) == known[0])

    return Item(row.id, f"{row.text('question')}\n\n{_NUMBER_FORM}", "all", score)


def read_math(row: PublishedRow) -> Item:
    """Read a row of MATH-500.

    Raises: ValueError if a field is missing; ModuleNotFoundError if Math-Verify is missing.
    """
    level = row.get("level")
    group = "all" if level is None else f"level {str(level).removeprefix('Level ')}"
    return _make_item(row, _FORM, row.text("answer"), group)


def read_aime(row: PublishedRow) -> Item:
    """Read a row of AIME 2025.

    Raises: ValueError if its answer is not an integer from 0 to 999; ModuleNotFoundError if
        Math-Verify is missing.
    """
    answer = row.text("answer").strip()
    known = _AIME_ANSWER.fullmatch(answer)
    if known is None:
        raise row.error(f"field 'answer' is not an integer from 0 to 999: {answer!r}")
    return _make_item(row, _INTEGER_FORM, known[1], "all")


def _make_item(row: PublishedRow, form: str, known: str, group: str) -> Item:
    _import_math_verify()  # Raises ModuleNotFoundError before any question is asked.

    def score(answer: str) -> float:
        return float(is_right(without_thoughts(answer), known))

    return Item(row.id, f"{row.text('problem', 'question')}\n\n{form}", group, score)


def is_right(answer: str, known: str) -> bool:
    r"""Return whether an answer's result, in ``\boxed{}`` or as a statement, equals ``known``.

    Must be called in the main thread: in another one, nothing can end an endless comparison.
    """
    result = find_box(answer)
    if result is None:
        if not (statements := find_statements(answer)):
            return False
        result = statements[0]
        answer = f"The answer is {result}"
    # Math-Verify gets the whole text: two boxes, \boxed{1} and \boxed{-2}, are one answer.
    return _normalise(result) == _normalise(known) or _is_verified(answer, known)


def _normalise(latex: str) -> str:
    return _SPACES.sub("", _SPACING.sub("", _TEXT.sub(r"\1", latex)).strip()).rstrip(".")


def _is_verified(answer: str, known: str) -> bool:
    library = _import_math_verify()
    forms = (
        library.LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),
        library.ExprExtractionConfig(try_extract_without_anchor=False),
    )
    # Math-Verify limits the time with an alarm, which only the main thread can set.
    seconds = _TIMEOUT if threading.current_thread() is threading.main_thread() else None

    def parse(text: str) -> Any:
        return library.parse(text, forms, parsing_timeout=seconds)

    known = f"\\boxed{{{known}}}"
    return bool(library.verify(parse(known), parse(answer), timeout_seconds=seconds))


def _import_math_verify() -> Any:
    return import_package("math_verify", "comparing mathematical answers")
