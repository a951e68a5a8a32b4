"""Say in words how two prompts differ (``find_changes``), or two texts (``explain_difference``)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flashmoa.observe.events import PromptSent
from flashmoa.observe.prompt_text import (
    as_json,
    common_prefix,
    message_text,
    settings,
    settings_text,
)

ChangeKind = Literal["settings", "tools", "value", "white space", "thought", "history", "text"]

REMEDIES: dict[ChangeKind, str] = {
    "settings": "send the same chat_template_kwargs, cache_salt, adapter, ... with each call",
    "tools": "send the same tools in the same order with each call of an agent",
    "value": "leave such values out, or put them at the end of the last message",
    "white space": "make the text in the same way for each call",
    "thought": "send answers as the model wrote them, or have it write no thoughts",
    "history": "drop messages seldom and many at once, and add messages at the end only",
    "text": "put what differs behind what prompts share",
}
"""What to do about a change."""

_DAY = r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?"
    r"|Sep(?:t(?:ember)?)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\b\.?"
)
_DATE = r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}"
_TIME = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?[AaPp][Mm]\b)?"
# What is likely to differ in each call. The first pattern that fits both texts counts.
_VALUES = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("a UUID", r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"),
        ("a time", rf"{_DATE}[T ]{_TIME}(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?|\b{_TIME}"),
        ("a date", rf"\b{_DATE}|\b\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{2,4}}"),
        ("a date", rf"\b(?:{_DAY},? )?(?:\d{{1,2}}\.? {_MONTH}|{_MONTH} \d{{1,2}})(?:,? \d{{4}})?"),
        ("a date", rf"\b(?:{_DAY}|{_MONTH})"),
        ("a time", r"\b1\d{9}(?:\d{3})?(?:\.\d+)?\b"),  # Unix seconds or milliseconds.
        ("a counter or another number", r"(?<!\w)\d+(?:[.,]\d+)*(?!\w)"),
        ("an identifier", r"\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{6,}\b"),
        ("a counter or another number", r"\d+(?:[.,]\d+)*"),
    )
)
# How far before and behind a difference such a value, or a thought's opening tag, is looked for.
_VALUE_CHARACTERS = 80
_THOUGHT = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>\s*", re.DOTALL)
_REASONING_FIELDS = ("reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two prompts; ``text`` names it in the words of a noun phrase."""

    kind: ChangeKind
    text: str


def find_changes(earlier: PromptSent, later: PromptSent) -> list[Change]:
    """Return how a prompt differs from an earlier one, beyond messages added at its end.

    That is at most one change of its settings, one of its tools and one, the first, of its
    messages.
    """
    found = (
        _settings_change(earlier, later),
        _tools_change(earlier.tools, later.tools),
        _messages_change(earlier.messages, later.messages),
    )
    return [change for change in found if change is not None]


def explain_difference(old: str, new: str, at: int) -> Change | None:
    """Return what differs between two texts that are equal up to the character ``at``.

    ``None``: nothing that can be named.
    """
    if _is_white_space(old, new, at):
        return Change("white space", "white space")
    if _has_thought(old, new, at) or _has_thought(new, old, at):
        return Change("thought", "a thought")
    for name, pattern in _VALUES:
        was, now = _find_at(pattern, old, at), _find_at(pattern, new, at)
        if was is not None and now is not None and was != now:
            return Change("value", name)
    return None


def _settings_change(earlier: PromptSent, later: PromptSent) -> Change | None:
    if settings_text(earlier) == settings_text(later):
        return None
    old, new = settings(earlier), settings(later)
    names = [name for name in old | new if old.get(name) != new.get(name)]
    return Change("settings", f"the request's {' and '.join(names) or 'settings'}")


def _tools_change(old: Sequence[Any], new: Sequence[Any]) -> Change | None:
    before, now = [as_json(tool) for tool in old], [as_json(tool) for tool in new]
    if before == now:
        return None
    if not old or not new:
        return Change("tools", f"the tools, of which there are none {'now' if old else 'before'}")
    if Counter(before) == Counter(now):
        return Change("tools", "the order of the tools")
    old_names, new_names = [list(map(_tool_name, tools)) for tools in (old, new)]
    gone = [name for name in old_names if name not in new_names]
    added = [name for name in new_names if name not in old_names]
    parts = [f"the tool {name}, which is left out" for name in gone]
    parts += [f"the tool {name}, which is new" for name in added]
    if parts:
        return Change("tools", ", ".join(parts))
    earlier = dict(zip(old_names, old, strict=True))
    for name, tool in zip(new_names, new, strict=True):
        was, text = as_json(earlier[name]), as_json(tool)
        if was != text:
            if earlier[name] == tool:
                return Change("tools", f"the order of the keys in the tool {name}")
            change = explain_difference(was, text, common_prefix(was, text))
            what = change.text if change is not None else "the definition"
            return Change(
                change.kind if change is not None else "tools", f"{what} of the tool {name}"
            )
    return Change("tools", "the tools, of which some come twice")


def _tool_name(tool: Any) -> str:
    try:
        return str(tool["function"]["name"])
    except (KeyError, TypeError):
        return as_json(tool)[:40]


def _messages_change(
    old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]
) -> Change | None:
    before, now = list(map(message_text, old)), list(map(message_text, new))
    pairs = enumerate(zip(before, now, strict=False))
    first = next((number for number, (was, text) in pairs if was != text), None)
    if first is None:
        return None
    label = _label(new[first], first)
    change = _history_change(before[first:], now[first:], label)
    if change is not None:
        return change
    was, text = before[first], now[first]
    has_other_words = was.split() != text.split()
    if has_other_words and _without_thought(old[first]) == _without_thought(new[first]):
        return Change("thought", f"a thought in {label}")
    explained = explain_difference(was, text, common_prefix(was, text))
    if explained is None:
        return Change("text", label)
    return Change(explained.kind, f"{explained.text} in {label}")


def _history_change(old: Sequence[str], new: Sequence[str], label: str) -> Change | None:
    """Return how the same messages come in another way, given those from the first difference on.

    ``None``: the first one is not among those of the other prompt.
    """
    if _is_subsequence(old, new):
        return Change("history", f"{_messages(new.index(old[0]))} put in before {label}")
    if Counter(old) <= Counter(new):
        return Change("history", f"the order of the messages from {label} on")
    if new[0] in old:
        return Change("history", f"{_messages(old.index(new[0]))} left out before {label}")
    return None


def _messages(count: int) -> str:
    return f"{count} message{'s' if count > 1 else ''}"


def _is_subsequence(some: Iterable[str], all_: Iterable[str]) -> bool:
    rest = iter(all_)
    return all(one in rest for one in some)


def _label(message: Mapping[str, Any], index: int) -> str:
    role = message.get("role")
    return f"the {role} message" if role == "system" else f"message {index + 1} ({role})"


def _without_thought(message: Mapping[str, Any]) -> str:
    kept = {name: value for name, value in message.items() if name not in _REASONING_FIELDS}
    return " ".join(_THOUGHT.sub("", message_text(kept)).split())


def _is_white_space(old: str, new: str, at: int) -> bool:
    """Return whether only white space differs, for as far as it can be seen."""
    if not (old[at : at + 1].isspace() or new[at : at + 1].isspace()):
        return False
    rests = [text[at : at + _VALUE_CHARACTERS] for text in (old, new)]
    was, now = ("".join(rest.split())[: _VALUE_CHARACTERS // 4] for rest in rests)
    return was == now or any(rest.isspace() for rest in rests)


def _has_thought(one: str, other: str, at: int) -> bool:
    """Return whether a text has a thought at ``at``, where the other one has none."""
    # Both may have the beginning of the tag, as other tags begin alike.
    tag = "<think"
    start = one.find(tag, max(0, at - len(tag)), at + len(tag))
    if start < 0 or other.startswith(tag, start):
        return False
    return _THOUGHT.match(one, start) is not None


def _find_at(pattern: re.Pattern[str], text: str, at: int) -> str | None:
    """Return the match that reaches the character ``at`` or ends there."""
    start = max(0, at - _VALUE_CHARACTERS)
    for match in pattern.finditer(text, start, at + _VALUE_CHARACTERS):
        if match.start() <= at <= match.end():
            return match.group()
    return None
