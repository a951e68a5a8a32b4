"""A run as a file: one event per line, as it happens, so that what a program that dies has
done until then can be read."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from flashmoa.engine import FlashMoAError
from flashmoa.observe.events import Event

_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}


class TraceError(FlashMoAError):
    """A file that is no trace."""


class Trace:
    """Writes events to a file (a ``Listener``), and keeps nothing open between them.

    Args:
        path: of the file; what was there is replaced.

    Raises: OSError, also where an event cannot be written.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._path.write_text("")

    def __call__(self, event: Event) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_as_json(event)) + "\n")


def read(path: Path | str) -> list[Event]:
    """The events of a trace, in their order; a last line that is cut off is left out.

    Raises:
        OSError: the file cannot be read.
        TraceError: it is something else than a trace.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    found: list[Event] = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(_from_json(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise TraceError(f"{path}, line {number}, is no event of a trace: {error}") from error
    return found


def _as_json(event: Event) -> dict[str, Any]:
    values = {one.name: getattr(event, one.name) for one in fields(event)}
    plain = {
        name: value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        for name, value in values.items()
    }
    return {"event": type(event).__name__, **plain}


def _from_json(line: dict[str, Any]) -> Event:
    kind = _KINDS[line.pop("event")]
    return TypeAdapter(kind).validate_python(line)
