"""Questions with their scoring, the files they are read from, and packages that may be missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

_PARQUET = b"PAR1"


@dataclass(frozen=True, slots=True)
class Item:
    """What to ask, and whether an answer is right.

    Attributes:
        id: the publisher's, or the number of its line.
        question: the user's message: the question, and how the answer is to be given.
        group: its difficulty or subject.
        score: of a whole answer: 0 (wrong, or none given) to 1. What a model thinks aloud before
            ``</think>`` does not count.
    """

    id: str
    question: str
    group: str
    score: Callable[[str], float]


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One question as published; ``number`` is its line (JSONL) or row (Parquet), from 1."""

    file: Path
    number: int
    fields: Mapping[str, Any]

    def get(self, *names: str) -> Any:
        """Return the first of these fields that is there and not null, in upper or lower case."""
        found = {name.lower(): value for name, value in self.fields.items()}
        return next((found[name] for name in names if found.get(name) is not None), None)

    def value(self, *names: str) -> Any:
        """Return the field as :meth:`get` does.

        Raises: ValueError if the row has none of these fields.
        """
        value = self.get(*names)
        if value is None:
            raise self.wrong(
                f"no field {' or '.join(map(repr, names))}; there are {', '.join(self.fields)}"
            )
        return value

    def text(self, *names: str) -> str:
        """Return the field as :meth:`value` does; a number as text.

        Raises: ValueError if it is something else.
        """
        value = self.value(*names)
        if isinstance(value, str | int | float):
            return str(value)
        raise self.wrong(f"field {' or '.join(map(repr, names))} is no text: {value!r}")

    @property
    def id(self) -> str:
        names = ("id", "unique_id", "question_id", "problem_idx", "key")
        return str(self.number if (found := self.get(*names)) is None else found)

    def wrong(self, problem: str) -> ValueError:
        return ValueError(f"{self.file}, line {self.number}: {problem}")


def rows(file: Path) -> list[PublishedRow]:
    """Read the rows of a file.

    Raises: ValueError if it cannot be read or is empty; ModuleNotFoundError without pyarrow, if it
    is a Parquet file.
    """
    try:
        with file.open("rb") as start:
            is_parquet = start.read(len(_PARQUET)) == _PARQUET
        found = list(_parquet(file) if is_parquet else _jsonl(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not found:
        raise ValueError(f"{file} has no questions")
    return found


def _parquet(file: Path) -> Iterator[PublishedRow]:
    parquet = package("pyarrow.parquet", f"{file}, a Parquet file,")
    try:
        table = parquet.read_table(file)
    except package("pyarrow", str(file)).ArrowException as error:
        raise ValueError(f"{file} is no Parquet: {error}") from error
    for number, fields in enumerate(table.to_pylist(), 1):
        yield PublishedRow(file, number, fields)


def _jsonl(file: Path) -> Iterator[PublishedRow]:
    # Not splitlines: questions may hold other line separators of Unicode.
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}, line {number} is no JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{file}, line {number} is no JSON object, one a line")
        yield PublishedRow(file, number, cast("dict[str, Any]", fields))


def package(name: str, needed_by: str, install: str = "'flashmoa-bench[datasets]'") -> Any:
    """Import a package that ``flashmoa-bench[datasets]`` installs, when it is needed.

    Raises: ModuleNotFoundError, which says what to install.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{needed_by} needs {error.name}: pip install {install}", name=error.name
        ) from error
