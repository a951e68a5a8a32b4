"""Write the events of a run to a file (``Trace``), and read them again (``read``).

Each event is a line that is written at once, so that the trace of a program that dies can be read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any, cast
from weakref import WeakSet

from pydantic import BaseModel, TypeAdapter

from flashmoa.errors import FlashMoAError
from flashmoa.observe.events import CallEvent, Event, Listener, PromptSent, contained

logger = logging.getLogger(__name__)

_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (*Event.__subclasses__(), *CallEvent.__subclasses__())
}
_LINE_START = '{"event": "'

# Links and runs may be in several threads, and the garbage collector may end a call at any moment.
_lock = RLock()


class TraceError(FlashMoAError):
    """Raised when a file is not a trace."""


class Trace:
    """Writes events to a file (a ``Listener``), and closes the file after each event.

    Args:
        path: the file's path; an existing trace is replaced.
        prompts: whether to write prompts, too. They show why a prefix broke, but may be
            confidential, and make the file larger: each prompt repeats earlier prompts.
        replace: whether to replace the file; ``False`` if another trace is writing it, too.

    If an event cannot be written (the disk is full), that is logged, and the trace ends there.

    Raises:
        OSError: if the file cannot be made.
        ValueError: if ``path`` is an existing file that is not a trace.
    """

    def __init__(self, path: Path | str, *, prompts: bool = False, replace: bool = True) -> None:
        # The program may change its folder later.
        self._path = Path(path).absolute()
        self._writes_prompts = prompts
        self._has_ended = False
        # Reading a device or a pipe may never end, and replacing it loses nothing.
        if replace and self._path.is_file():
            try:
                next(_read_events(self._path), None)
            except TraceError as error:
                raise ValueError(
                    f"{self._path} exists and is not a trace; give another name, or delete it"
                ) from error
        if replace:
            self._path.write_text("")

    def __call__(self, event: Event) -> None:
        if self._has_ended or (isinstance(event, PromptSent) and not self._writes_prompts):
            return
        try:
            with _lock, self._path.open("a", encoding="utf-8") as file:
                # Tools may be objects of OpenAI's client.
                file.write(json.dumps(_as_json(event), default=str) + "\n")
        except OSError as error:
            self._has_ended = True
            text = "The trace %s could not be written and ends here: %s"
            logger.warning(text, self._path, error)


class _TracedListener:
    """Passes events to a trace and to a listener; neither raises exceptions."""

    def __init__(
        self, listener: Listener, path: Path | str, *, prompts: bool, successor_of: Listener | None
    ) -> None:
        self._place = Path(path).resolve()
        with _lock:
            others = [other for other in _open if other is not successor_of]
            is_written = any(other._place == self._place for other in others)
            trace = Trace(path, prompts=prompts, replace=not is_written)
            _open.add(self)
        self._listeners = contained(trace), contained(listener)

    def __call__(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)


# The listeners of links and runs that have not ended. Some links are dropped without an end.
_open: WeakSet[_TracedListener] = WeakSet()


def add_trace(
    listener: Listener,
    path: Path | str | None,
    *,
    prompts: bool,
    successor_of: Listener | None = None,
) -> Listener:
    """Return a listener that calls ``listener`` and, if ``path`` is given, writes a trace.

    An existing trace is replaced, unless other listeners of this process are writing it: then all
    write to it. Give the result to :func:`end_trace` after the last event. It logs exceptions of
    ``listener`` instead of raising them.

    Args:
        prompts: see :class:`Trace`.
        successor_of: a listener whose trace is replaced although it has not ended.

    Raises:
        OSError, ValueError: see :class:`Trace`.
    """
    if path is not None:
        return _TracedListener(listener, path, prompts=prompts, successor_of=successor_of)
    return contained(listener)


def end_trace(listener: Listener) -> None:
    """Let later listeners replace the trace of ``listener``, unless others are writing it."""
    with _lock:
        if isinstance(listener, _TracedListener):
            _open.discard(listener)


def read(path: Path | str) -> list[Event]:
    """Return the events of a trace in order; a last line that is cut off is left out.

    Raises:
        OSError: if the file cannot be read.
        TraceError: if the file does not exist, or is not a trace.
    """
    return list(_read_events(path))


def _read_events(path: Path | str) -> Iterator[Event]:
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                event = _read_line(path, number, line)
                if event is not None:
                    yield event
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not a trace: it is not text") from error
    except FileNotFoundError as error:
        raise TraceError(f"the file {path} does not exist") from error


def _read_line(path: Path | str, number: int, line: str) -> Event | None:
    """Return the event of a line; ``None`` if the line is cut off, as a last line may be."""
    try:
        return _from_json(json.loads(line))
    except (ValueError, KeyError, TypeError) as error:
        is_cut = isinstance(error, json.JSONDecodeError) and not line.endswith("\n")
        # A file that begins in another way may be a user's, which must not be replaced.
        if is_cut and line[: len(_LINE_START)] == _LINE_START[: len(line)]:
            return None
        raise TraceError(
            f"{path} is not a trace, as link(team, trace=FILE) writes it; its line {number} is "
            f"not an event: {error!r}"
        ) from error


def _as_json(event: Event) -> dict[str, Any]:
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    plain = {
        name: value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        for name, value in values.items()
    }
    return {"event": type(event).__name__, **plain}


def _from_json(line: object) -> Event:
    if not isinstance(line, dict):
        raise TypeError(f"{line!r:.80} is not a JSON object")
    values = cast("dict[str, Any]", line)
    return _adapter(_KINDS[values.pop("event")]).validate_python(values)


@cache
def _adapter(kind: type[Event]) -> TypeAdapter[Event]:
    return TypeAdapter(kind)
