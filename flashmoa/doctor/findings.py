"""What a check found, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# It works; it works, but with less than it could; it does not work.
Level = Literal["ok", "note", "fix"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        about: what was checked, in a word or two.
        text: what was found.
        remedy: the one command or argument that fixes it; empty where nothing is to be done.
    """

    level: Level
    about: str
    text: str
    remedy: str = ""


def ok(about: str, text: str) -> Finding:
    """Report that something works."""
    return Finding("ok", about, text)


def note(about: str, text: str, remedy: str = "") -> Finding:
    """Report something that works with less than it could."""
    return Finding("note", about, text, remedy)


def fix(about: str, text: str, remedy: str) -> Finding:
    """Report something that does not work."""
    return Finding("fix", about, text, remedy)
