"""The order in which things are compared within one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=str)


def order(repeats: int, modes: Sequence[Name]) -> list[Name]:
    """Modes in turn, each round starting with another one, so that drift hits all alike."""
    return [modes[(start + i) % len(modes)] for start in range(repeats) for i in range(len(modes))]
