"""Learn which fields of calls, beside the messages, change from run to run (`ChangingFields`).

Some programs list their tools in another order each time, or give a date to the chat template. The
prompt's text after such a field cannot be predicted. No I/O.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

Fields = Mapping[str, Any]
# The value of each changed field before its last change, and the number of runs since.
Changes = Mapping[str, tuple[Any, int]]

# Engines refuse these fields without tools.
_NEED_TOOLS = ("tool_choice", "parallel_tool_calls")


class ChangingFields:
    """Knows which fields of calls change in a run, compared with the last run."""

    def __init__(self) -> None:
        # Another value of a field, by its name and its content in any order. Calls often have equal
        # fields, and one call shows that they change.
        self._others: dict[tuple[str, Hashable], Any] = {}

    def add(self, fields: Fields, changes: Changes) -> None:
        """Note a call of the last run: its fields, and their changes up to then."""
        for name, (other, _) in changes.items():
            self._note(name, fields.get(name), other)

    def compare(self, earlier: Fields, changes: Changes, now: Fields) -> Changes:
        """Return the changes of a call's fields, given the changes up to the last run."""
        found = {name: (other, runs + 1) for name, (other, runs) in changes.items()}
        # After eight equal runs, a field is expected to stay the same.
        found = {name: change for name, change in found.items() if change[1] < 8}
        for name in earlier.keys() | now.keys():
            if _text(earlier.get(name)) != _text(now.get(name)):
                found[name] = earlier.get(name), 0
                self._note(name, earlier.get(name), now.get(name))
                self._note(name, now.get(name), earlier.get(name))
        return found

    def compare_order(self, before: Fields, now: Fields) -> None:
        """Note the fields that an agent sends in another order than in its last call."""
        for name in before.keys() & now.keys():
            value, other = before[name], now[name]
            if _text(value) != _text(other) and _content(value) == _content(other):
                self._note(name, other, value)

    def forms(self, fields: Fields, changes: Changes) -> list[Fields]:
        """Return forms of a call's fields that differ where this run's call may differ.

        Args:
            fields: the fields of the last run, which are the first form.
            changes: their changes up to then.
        """
        others = {name: other for name, (other, _) in changes.items()}
        for name, value in fields.items() if self._others else ():
            if (key := (name, _content(value))) in self._others:
                others.setdefault(name, self._others[key])
        if not others:
            return [fields]
        left_out = {*others, *(_NEED_TOOLS if "tools" in others else ())}
        without = {name: value for name, value in fields.items() if name not in left_out}
        changed = {name: value for name, value in {**fields, **others}.items() if value is not None}
        return [fields, changed, without]

    def _note(self, name: str, value: Any, other: Any) -> None:
        if value is not None:
            self._others[name, _content(value)] = other


def _text(value: Any) -> str:
    # Chat templates show keys in the order of the request.
    return json.dumps(value)


def _content(value: Any) -> Hashable:
    """Return a key that does not depend on the order of a value's items."""
    return frozenset(Counter(_text(value)).items())
