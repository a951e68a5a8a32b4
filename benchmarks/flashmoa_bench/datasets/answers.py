"""Where an answer says what it comes to."""

from __future__ import annotations

import re
from fractions import Fraction

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
# "The answer is **42**." "Final answer: 42", up to the end of the sentence or paragraph.
_STATED = re.compile(
    r"\banswer\b[\s*]*(?:is\b|[:=])[\s:*]*(.+?)(?=[.!?]['\")*\]]*(?:\s|\Z)|\n\s*\n|\Z)",
    re.IGNORECASE | re.DOTALL,
)
_HASHES = re.compile(r"####\s*([^\n]*)")
_FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}")
# What stands around numbers and says nothing of their value.
_DRESS = re.compile(r"\\?[$£€]|\\[,!]|°|\^\{?\\circ\}?")
# Neither an exponent, an index or a part of a name, nor what an exponent stands on; nor the
# thousands of digits that a model may repeat itself into, which int() refuses.
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_^.])(?<![_^]\{)"
    r"((?:(?<![\w)}\]])-)?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3}){1,30}|[0-9]{1,90})(?:\.[0-9]{1,90})?|\.[0-9]{1,90}))"
    r"(?:\s?/\s?(0{,9}[1-9][0-9]{,90}))?(?![,.]?[0-9]|\s?\^)"
)


def without_thoughts(text: str) -> str:
    """Return what follows ``</think>``; nothing if thinking did not come to an end."""
    _, closed, after = text.rpartition("</think>")
    if closed:
        return after
    return "" if text.lstrip().startswith("<think>") else text


def boxed(text: str) -> str | None:
    r"""Return what is in the last ``\boxed{...}`` that is closed."""
    for box in reversed(list(_BOX.finditer(text))):
        depth = 1
        for brace in _BRACES.finditer(text, box.end()):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if not depth:
                return text[box.end() : brace.start()].strip()
    return None


def stated(text: str) -> list[str]:
    """Return what follows "the answer is" or "Answer:", the last one first."""
    return [found[1].strip(" *\n") for found in reversed(list(_STATED.finditer(text)))]


def numbers(text: str) -> list[Fraction]:
    """Return the numbers in a text: 1,234.50, -3, 3/4, LaTeX fractions; without currency signs."""
    text = _FRACTION.sub(r" \1/\2", text.replace("−", "-").replace("{,}", ","))
    return [
        Fraction(found[1].replace(",", "")) / int(found[2] or 1)
        for found in _NUMBER.finditer(_DRESS.sub("", text))
    ]


def final_number(text: str) -> Fraction | None:
    r"""Return the number in the box, after


    , or after "the answer is"; else the last one.
    """
    hashes = _HASHES.findall(text)
    if (given := boxed(text)) is not None or hashes:
        return _right_side(hashes[-1] if given is None else given)
    for statement in stated(text):
        if (number := _right_side(statement)) is not None:
            return number
    found = numbers(text)
    return found[-1] if found else None


def _right_side(text: str) -> Fraction | None:
    """Return the first number after the last =: of "3 x 4 = 12 apples in 2 bags", 12."""
    return next(iter(numbers(text.rpartition("=")[2])), None)
