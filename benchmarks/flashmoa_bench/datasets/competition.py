r"""MATH-500 and AIME 2025: problems in LaTeX, answers in ``\boxed{}``.

MATH-500 (HuggingFaceH4/MATH-500): {problem, answer, level, unique_id}. AIME 2025 has several
publishers: math-ai/aime25, MathArena/aime_2025, yentinglin/aime_2025 {problem, answer} and
opencompass/AIME2025 {question, answer}.
"""

from __future__ import annotations

import re

from flashmoa_bench.datasets import equality
from flashmoa_bench.datasets.answers import without_thoughts
from flashmoa_bench.datasets.files import Row
from flashmoa_bench.datasets.items import Item

_FORM = "Think step by step, and put the final answer in \\boxed{}."
_INTEGER_FORM = "Think step by step, and put the final answer, an integer, in \\boxed{}."
# opencompass has an angle as 336^\circ.
_AIME_ANSWER = re.compile(r"0*([0-9]{1,3})(?:\^\{?\\circ\}?)?")


def read_math(row: Row) -> Item:
    """Raises: ValueError, ModuleNotFoundError."""
    level = row.get("level")
    group = "all" if level is None else f"level {str(level).removeprefix('Level ')}"
    return _item(row, _FORM, row.text("answer"), group)


def read_aime(row: Row) -> Item:
    """Raises: ValueError, ModuleNotFoundError."""
    answer = row.text("answer").strip()
    known = _AIME_ANSWER.fullmatch(answer)
    if known is None:
        raise row.wrong(f"field 'answer' is no integer from 0 to 999: {answer!r}")
    return _item(row, _INTEGER_FORM, known[1], "all")


def _item(row: Row, form: str, known: str, group: str) -> Item:
    equality.check_installed()

    def score(answer: str) -> float:
        return float(equality.says(without_thoughts(answer), known))

    return Item(row.id, f"{row.text('problem', 'question')}\n\n{form}", group, score)
