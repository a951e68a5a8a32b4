"""The result of a check: a ``Finding``, made by ``ok``, ``note`` or ``fix``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# "note": it works, but could work better. "fix": it does not work.
Level = Literal["ok", "note", "fix"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        about: the thing that was checked, in a word or two.
        text: the result, in one line or several. "It" in this text is the thing that was checked.
        remedy: the command or argument that fixes the problem; empty if there is none.
    """

    level: Level
    about: str
    text: str
    remedy: str = ""


def ok(about: str, text: str) -> Finding:
    return Finding("ok", about, text)


def note(about: str, text: str, remedy: str = "") -> Finding:
    return Finding("note", about, text, remedy)


def fix(about: str, text: str, remedy: str) -> Finding:
    return Finding("fix", about, text, remedy)
