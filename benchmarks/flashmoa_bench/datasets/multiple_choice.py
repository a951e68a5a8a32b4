"""Read MMLU-ProX-Lite (li-lab/MMLU-ProX-Lite), a file for each language, or MMLU-Pro.

Both have the form {question, option_0 to option_9 or options, answer or answer_index, category,
question_id}. The form of the answer is asked for in English, whatever the question's language.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from flashmoa_bench.datasets.answers import find_box, find_statements, without_thoughts
from flashmoa_bench.datasets.files import Item, PublishedRow

_LETTERS = "ABCDEFGHIJ"
_FORM = (
    'Think step by step, and end with the line "The answer is (X)", '
    "where X is the letter of the right option."
)
# Text that may precede a letter: brackets, bold, \text{}, "option" or "choice".
_OPEN = r"(?:\\(?:text(?:bf)?|mathrm|boxed)|[\s*_($\[{（「]|\\[(\[]|[Oo]ption\b|[Cc]hoice\b)*"
_FIRST = re.compile(rf"{_OPEN}([A-J])(?![A-Za-z0-9'’+-])")
# A and I may be words: "the answer is a ...", "I think ...".
_WORD = re.compile(r"[AI] (?!because\b|since\b|as\b|and\b|which\b)[A-Za-z]")
_BRACKETED = re.compile(r"[(（]([A-J])[)）]")
_ALONE = re.compile(rf"{_OPEN}([A-J])[\s*_)$\]}}）」.。\\]*|([A-J])[.):]\s[^\n]*")


def read(row: PublishedRow) -> Item:
    """Read a row of MMLU-ProX-Lite or MMLU-Pro.

    Raises: ValueError if its answer is not one of its options.
    """
    options = _read_options(row)
    known = _read_answer(row)
    if known not in options:
        raise row.error(f"the answer is {known}, the options are {', '.join(options)}")
    listed = "\n".join(f"{letter}. {text}" for letter, text in options.items())

    def score(answer: str) -> float:
        return float(find_choice(without_thoughts(answer)) == known)

    question = f"{row.text('question')}\n\n{listed}\n\n{_FORM}"
    return Item(row.id, question, row.text("category"), score)


def find_choice(answer: str) -> str | None:
    """Return the option that an answer chooses; ``None`` if it chooses none.

    It is in a box or after "the answer is"; else it is the only letter in brackets on the last line
    (in any language), or the whole answer.
    """
    for text in [find_box(answer) or "", *find_statements(answer)]:
        if (match := _FIRST.match(text)) and not _WORD.match(text, match.start(1)):
            return match[1]
    text = answer.strip()
    bracketed = set(_BRACKETED.findall(text.rpartition("\n")[2]))
    if len(bracketed) == 1:
        return bracketed.pop()
    alone = _ALONE.fullmatch(text)
    return (alone[1] or alone[2]) if alone else None


def _read_options(row: PublishedRow) -> Mapping[str, str]:
    listed = row.get("options")
    if not isinstance(listed, list | tuple):
        listed = [row.get(f"option_{number}") for number in range(len(_LETTERS))]
    options = dict(zip(_LETTERS, cast("Sequence[Any]", listed), strict=False))
    options = {letter: str(text) for letter, text in options.items() if text is not None}
    if not options:
        row.value("options", "option_0")  # Raises ValueError.
    return options


def _read_answer(row: PublishedRow) -> str:
    known = row.get("answer")
    if isinstance(known, str) and known.strip() in tuple(_LETTERS):
        return known.strip()
    index = row.value("answer_index", "answer")
    if isinstance(index, int | float) and index in range(len(_LETTERS)):
        return _LETTERS[int(index)]
    raise row.error(f"field 'answer' is not a letter from A to J: {known!r}")
