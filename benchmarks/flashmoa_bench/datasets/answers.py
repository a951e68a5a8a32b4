"""Find the result in an answer: in a box, in a statement, or as a number."""

from __future__ import annotations

import re
from fractions import Fraction

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
# Matches "The answer is **42**." and "Final answer: 42", to the end of the sentence or paragraph.
_STATEMENT = re.compile(
    r"\banswer\b[\s*]*(?:is\b|[:=])[\s:*]*(.+?)(?=[.!?]['\")*\]]*(?:\s|\Z)|\n\s*\n|\Z)",
    re.IGNORECASE | re.DOTALL,
)
_HASHES = re.compile(r"####\s*([^\n]*)")
_FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}")
# Symbols around numbers that do not change their value.
_DECORATION = re.compile(r"\\?[$£€]|\\[,!]|°|\^\{?\\circ\}?")
# Does not match exponents, indices, parts of names and bases of exponents, or the thousands of
# digits that a repeating model may write, which int() would refuse.
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_^.])(?<![_^]\{)"
    r"((?:(?<![\w)}\]])-)?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3}){1,30}|[0-9]{1,90})(?:\.[0-9]{1,90})?|\.[0-9]{1,90}))"
    r"(?:\s?/\s?(0{,9}[1-9][0-9]{,90}))?(?![,.]?[0-9]|\s?\^)"
)


def without_thoughts(text: str) -> str:
    """Return the text after ``</think>``; nothing if the model was still thinking at the end."""
    _, end_tag, after = text.rpartition("</think>")
    if end_tag:
        return after
    return "" if text.lstrip().startswith("<think>") else text


def find_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` that is closed; ``None`` without one."""
    for box in reversed(list(_BOX.finditer(text))):
        depth = 1
        for brace in _BRACES.finditer(text, box.end()):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if not depth:
                return text[box.end() : brace.start()].strip()
    return None


def find_statements(text: str) -> list[str]:
    """Return the texts after "the answer is" or "Answer:", the last one first."""
    return [match[1].strip(" *\n") for match in reversed(list(_STATEMENT.finditer(text)))]


def find_numbers(text: str) -> list[Fraction]:
    """Return the numbers in a text: 1,234.50, -3, 3/4, LaTeX fractions; without currency signs."""
    text = _FRACTION.sub(r" \1/\2", text.replace("−", "-").replace("{,}", ","))
    return [
        Fraction(match[1].replace(",", "")) / int(match[2] or 1)
        for match in _NUMBER.finditer(_DECORATION.sub("", text))
    ]


def find_final_number(text: str) -> Fraction | None:
    """Return the number in the box, after ``####`` or after "the answer is"; else the last one.

    ``None`` if the text has no number there.
    """
    hashes = _HASHES.findall(text)
    if (box := find_box(text)) is not None or hashes:
        return _find_result(hashes[-1] if box is None else box)
    for statement in find_statements(text):
        if (number := _find_result(statement)) is not None:
            return number
    numbers = find_numbers(text)
    return numbers[-1] if numbers else None


def _find_result(text: str) -> Fraction | None:
    """Return the first number after the last =, such as 12 in "3 x 4 = 12 apples in 2 bags"."""
    return next(iter(find_numbers(text.rpartition("=")[2])), None)
