"""Define questions with their scoring, read published files, and import optional packages."""

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
    """A question, and how its answers are scored.

    Attributes:
        id: the publisher's id, or the number of its line.
        question: the user's message: the question, and the form that the answer should have.
        group: difficulty or subject.
        score: returns the score of a whole answer, from 0 (wrong, or no answer) to 1. A model's
            thoughts before ``</think>`` do not count.
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
        """Return the first of these fields that exists and is not null, in any case."""
        fields = {name.lower(): value for name, value in self.fields.items()}
        return next((fields[name] for name in names if fields.get(name) is not None), None)

    def value(self, *names: str) -> Any:
        """Return the field as :meth:`get` does.

        Raises: ValueError if the row has none of these fields.
        """
        value = self.get(*names)
        if value is None:
            raise self.error(
                f"no field {' or '.join(map(repr, names))}; there are {', '.join(self.fields)}"
            )
        return value

    def text(self, *names: str) -> str:
        """Return the field as :meth:`value` does, a number as text.

        Raises: ValueError if it is neither a text nor a number.
        """
        value = self.value(*names)
        if isinstance(value, str | int | float):
            return str(value)
        raise self.error(f"field {' or '.join(map(repr, names))} is not a text: {value!r}")

    @property
    def id(self) -> str:
        names = ("id", "unique_id", "question_id", "problem_idx", "key")
        return str(self.number if (value := self.get(*names)) is None else value)

    def error(self, problem: str) -> ValueError:
        """Make an exception that says where in the file the problem is."""
        return ValueError(f"{self.file}, line {self.number}: {problem}")


def read_rows(file: Path) -> list[PublishedRow]:
    """Read the rows of a file.

    Raises: ValueError if the file cannot be read or is empty; ModuleNotFoundError if it is a
        Parquet file and pyarrow is missing.
    """
    try:
        with file.open("rb") as start:
            is_parquet = start.read(len(_PARQUET)) == _PARQUET
        rows = list(_read_parquet(file) if is_parquet else _read_jsonl(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not rows:
        raise ValueError(f"{file} has no questions")
    return rows


def _read_parquet(file: Path) -> Iterator[PublishedRow]:
    parquet = import_package("pyarrow.parquet", f"{file}, a Parquet file,")
    try:
        table = parquet.read_table(file)
    except import_package("pyarrow", str(file)).ArrowException as error:
        raise ValueError(f"{file} is not a Parquet file: {error}") from error
    for number, fields in enumerate(table.to_pylist(), 1):
        yield PublishedRow(file, number, fields)


def _read_jsonl(file: Path) -> Iterator[PublishedRow]:
    # splitlines would also split at other line separators of Unicode, which questions may have.
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}, line {number} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{file}, line {number} is not a JSON object")
        yield PublishedRow(file, number, cast("dict[str, Any]", fields))


def import_package(name: str, needed_by: str, install: str = "'flashmoa-bench[datasets]'") -> Any:
    """Import a package that is not always installed.

    Args:
        needed_by: subject of the message if the package is missing.
        install: arguments of ``pip install`` in that message.

    Raises: ModuleNotFoundError, with a message that says what to install, if it is missing.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{needed_by} needs {error.name}: pip install {install}", name=error.name
        ) from error
