"""Limit what a process that runs for ever remembers (:class:`Recent`)."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

# Most prompt streams of an engine: more calls cannot be linked at once.
MAX_CALLS_AT_ONCE = 256
# Most texts, names, kinds of messages and the like to remember. Nothing limits their number.
MAX_REMEMBERED = 4096


class Recent(dict[Key, Value]):
    """Remembers the entries that were set last, oldest first; by default ``MAX_REMEMBERED``."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self._limit = MAX_REMEMBERED if limit is None else limit

    def __setitem__(self, key: Key, value: Value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._limit:
            del self[next(iter(self))]
