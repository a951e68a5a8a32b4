"""What a check found, and what mends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# It is as it should be; it works, but with less than it could; it does not work.
Level = Literal["ok", "note", "mend"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's list.

    Attributes:
        about: what was looked at, in a word or two.
        text: what was found.
        remedy: the one command or argument that mends it; empty where nothing is to be done.
    """

    level: Level
    about: str
    text: str
    remedy: str = ""


def ok(about: str, text: str) -> Finding:
    return Finding("ok", about, text)


def note(about: str, text: str, remedy: str = "") -> Finding:
    return Finding("note", about, text, remedy)


def mend(about: str, text: str, remedy: str) -> Finding:
    return Finding("mend", about, text, remedy)
