"""Find where prompts stopped sharing a prefix, and what that cost (``find_breaks``).

An engine reuses the KV of an earlier prompt up to the first token that differs. Users expect that
an agent's prompt begins with the one before it, and that agents share what is in all of their
prompts. A *break* is a place where that is not so.

Prompts are compared as text made of what was sent, in the order in which most chat templates show
it: the request's settings, each tool, each message. What a chat template itself changes is not
seen.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flashmoa.observe.calls import Call
from flashmoa.observe.events import PromptSent
from flashmoa.observe.summary import seconds

# Prefilling fewer tokens takes about as long as prefilling one.
_FEWEST_TOKENS = 32
NO_BREAK = f"no prompt had {_FEWEST_TOKENS} tokens or more computed again as its prefix broke"
_SHOWN_CHARACTERS = 48
# Of how much text agents must have in common, behind a difference, to be expected to share it.
_SHARED_CHARACTERS = 1000
# With how many other prompts an agent's first one is compared. In a trace where each call has an
# agent's name of its own, all pairs would take minutes.
_MOST_COMPARED = 32
# The tools themselves show the first one; the others change the end of a prompt only.
_SEEN_ELSEWHERE = ("tool_choice", "continue_final_message", "add_generation_prompt")

# What to do about a part that differs, by its kind.
_REMEDIES = {
    "setting": "send the same chat_template_kwargs, cache_salt, adapter, ... with each call",
    "tool": "send the same tools in the same order with each call of an agent",
    "system": "put what differs at the end of the last message",
    "message": "add messages at the end only, and send answers as the model wrote them",
}
# Of two parts that differ, the kind that comes first in prompts is the reason.
_ORDER = {"setting": 0, "tool": 1, "system": 2, "message": 2}


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a prompt as text; two are equal if their texts are."""

    text: str
    place: str = field(compare=False)
    kind: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    """A prompt that does not begin as an earlier one does, although much of it is the same.

    Attributes:
        call, earlier: the call with the prompt, and the one whose prompt it is compared with.
        number: the number of the call among its agent's, from 1.
        place: what differs first, ``the system message`` for instance.
        remedy: what to do about it.
        old, new: the texts of the prompts that were compared. ``old`` includes the agent's answer,
            if the later prompt has a message in its place.
        at: the number of characters that these have in common at their beginnings.
        repeated: the share of the text behind the difference that is in the earlier prompt, too.
        times, again_in_all: see :func:`group_breaks`.
    """

    call: Call
    earlier: Call
    number: int
    place: str
    remedy: str
    old: str = field(repr=False)
    new: str = field(repr=False)
    at: int
    repeated: float
    times: int = 1
    again_in_all: int = 0

    @property
    def computed_tokens(self) -> int | None:
        """How much of the prompt was computed for the call, ahead of it or not, if known."""
        usage = self.call.usage
        if usage is None or usage.cached_tokens is None:
            return None
        return usage.prompt_tokens - usage.cached_tokens + (usage.streamed_tokens or 0)

    @property
    def again_tokens(self) -> int | None:
        """Estimate how many of these the engine had computed for the earlier prompt."""
        usage, computed = self.call.usage, self.computed_tokens
        if usage is None:
            return None
        behind = usage.prompt_tokens * (len(self.new) - self.at) / len(self.new)
        # More may have been computed, as engines forget what they had computed long ago.
        return round(self.repeated * (behind if computed is None else min(behind, computed)))

    def describe(self) -> str:
        """Return where it differs, both texts there, what that cost and what to do, in lines."""
        same_agent = self.earlier.agent == self.call.agent
        other = "its prompt before" if same_agent else f"the prompt of {self.earlier.agent}"
        start = max(0, self.at - _SHOWN_CHARACTERS)
        common = ("…" if start else "") + self.new[start : self.at]
        lines = [
            f"{self.call.agent}, call {self.number}: {self.place} differs",
            f"  from {other} at character {self.at:,} of {len(self.new):,}",
            f"  common  {common!r}",
            f"  before  {_beginning(self.old[self.at :])}",
            f"  now     {_beginning(self.new[self.at :])}",
            f"  cost    {self._cost()}",
            f"  remedy  {self.remedy}",
        ]
        if self.times > 1:
            total = f"about {self.again_in_all:,} tokens computed again"
            lines.append(f"  {self.times} times in all, {total}")
        return "\n".join(lines)

    def _cost(self) -> str:
        usage, computed = self.call.usage, self.computed_tokens
        if usage is None:
            return "not known, as the engine reported no usage"
        text = (
            f"about {self.again_tokens:,} of {usage.prompt_tokens:,} prompt tokens computed again"
        )
        if computed is not None:
            text += f" ({computed:,} computed, {usage.streamed_tokens or 0:,} ahead of the call)"
        if self.call.first_token is not None:
            waited = self.call.first_token - self.call.started.at
            text += f"; first token after {seconds(waited)}"
        return text


def _beginning(text: str) -> str:
    more = "…" if len(text) > _SHOWN_CHARACTERS else ""
    return repr(text[:_SHOWN_CHARACTERS] + more) if text else "(its end)"


def group_breaks(breaks: Iterable[PrefixBreak]) -> list[PrefixBreak]:
    """Return the costliest break of each agent and remedy, the agents that lost most first.

    Those that cost less than a few tokens are left out; ``times`` and ``again_in_all`` are of all
    that are left.
    """
    groups: defaultdict[object, list[PrefixBreak]] = defaultdict(list)
    for one in breaks:
        if one.again_tokens is None or one.again_tokens >= _FEWEST_TOKENS:
            same_agent = one.call.agent == one.earlier.agent
            groups[one.call.agent, one.call.started.engine, same_agent, one.remedy].append(one)
    worst = [
        replace(
            max(members, key=lambda one: one.again_tokens or 0),
            times=len(members),
            again_in_all=sum(one.again_tokens or 0 for one in members),
        )
        for members in groups.values()
    ]
    return sorted(worst, key=lambda one: -one.again_in_all)


def find_breaks(calls: Iterable[Call]) -> list[PrefixBreak]:
    """Return the breaks of a run, in the order of its calls.

    An agent's prompt is compared with its prompt before, on the same engine and for the same model;
    an agent's first prompt with the latest ones of other agents there.

    Args:
        calls: the calls, in the order in which they started; those without a prompt do not count.
    """
    latest: defaultdict[object, deque[_SentPrompt]] = defaultdict(
        lambda: deque(maxlen=_MOST_COMPARED)
    )
    newest: dict[object, _SentPrompt] = {}
    counts = Counter[object]()
    found: list[PrefixBreak] = []
    for call in calls:
        if call.prompt is None:
            continue
        prompt = _SentPrompt(call, call.prompt, _parts(call.prompt))
        where = (call.started.engine, call.started.model)
        expected = newest.get((call.agent, where)) or _find_expected(latest[where], prompt)
        counts[call.agent, where] += 1
        number = counts[call.agent, where]
        broken = _compare(expected, prompt, number) if expected is not None else None
        if broken is not None:
            found.append(broken)
        newest[call.agent, where] = prompt
        latest[where].append(prompt)
    return found


@dataclass(frozen=True, slots=True)
class _SentPrompt:
    call: Call
    sent: PromptSent
    parts: list[_Part]


def _find_expected(latest: Iterable[_SentPrompt], prompt: _SentPrompt) -> _SentPrompt | None:
    """Return the prompt with which an agent's first one could have shared much more than it did
    with any."""
    best, most, shared = None, 0, 0
    for other in latest:
        first = _first_difference(other.parts, prompt.parts)
        common = _length(prompt.parts[:first])
        shared = max(shared, common)
        common += count_repeated(other.parts, prompt.parts, first)
        if common >= most:
            best, most = other, common
    return best if most - shared >= _SHARED_CHARACTERS else None


def _compare(earlier: _SentPrompt, later: _SentPrompt, number: int) -> PrefixBreak | None:
    """Return where a prompt leaves an earlier one; ``None`` if it begins with it, or is shorter."""
    old_parts, new_parts = _with_answer(earlier, later), later.parts
    first = _first_difference(old_parts, new_parts)
    if first == min(len(old_parts), len(new_parts)):
        return None
    was, now = old_parts[first], new_parts[first]
    old, new = (_join(parts) for parts in (old_parts, new_parts))
    shared = _first_difference(was.text, now.text)
    at = len(_join([*new_parts[:first], _Part("", "", "")])) + shared
    at += _first_difference(old[at:], new[at:])  # One part may end where the other goes on.
    if at in (len(old), len(new)):
        return None
    differs = min(now, was, key=lambda part: _ORDER[part.kind])
    return PrefixBreak(
        call=later.call,
        earlier=earlier.call,
        number=number,
        place=differs.place,
        remedy=_REMEDIES[differs.kind],
        old=old,
        new=new,
        at=at,
        repeated=count_repeated(old_parts, new_parts, first)
        / (_length(new_parts[first:]) - shared),
    )


def _with_answer(earlier: _SentPrompt, later: _SentPrompt) -> list[_Part]:
    """Return an agent's prompt with its answer at the end, if the later one has a message there.

    The answer is in the engine's cache, too. What the model wrote for a tool call is not known.
    """
    finished, number = earlier.call.finished, len(earlier.sent.messages)
    answer = later.sent.messages[number] if len(later.sent.messages) > number else {}
    is_answer = answer.get("role") == "assistant" and not answer.get("tool_calls")
    if earlier.call.agent != later.call.agent or not is_answer or not finished:
        return earlier.parts
    as_written = _message_part(number, {**answer, "content": finished.text})
    return [*earlier.parts, as_written] if finished.text else earlier.parts


def _parts(prompt: PromptSent) -> list[_Part]:
    return [
        *(
            _Part(f"{name}: {_as_json(value)}", f"the request's {name}", "setting")
            for name, value in sorted(prompt.settings.items())
            if name not in _SEEN_ELSEWHERE
        ),
        *(_Part(_as_json(tool), "the list of tools", "tool") for tool in prompt.tools),
        *(_message_part(number, message) for number, message in enumerate(prompt.messages)),
    ]


def _message_part(index: int, message: Mapping[str, Any]) -> _Part:
    """Return a message as text: its role, its content, and its other fields that are set."""
    role, content = message.get("role"), message.get("content")
    text = content if isinstance(content, str) else _as_json(content) if content else ""
    fields = {
        name: value for name, value in message.items() if value and name not in ("role", "content")
    }
    shown = f"{role}: {text}" + (f" {_as_json(fields)}" if fields else "")
    if role == "system":
        return _Part(shown, "the system message", "system")
    return _Part(shown, f"message {index + 1} ({role})", "message")


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _join(parts: Iterable[_Part]) -> str:
    return "\n".join(part.text for part in parts)


def _length(parts: Iterable[_Part]) -> int:
    return sum(len(part.text) for part in parts)


def _first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many items two sequences have in common at their beginnings."""
    pairs = enumerate(zip(one, other, strict=False))
    least = min(len(one), len(other))
    return next((number for number, (left, right) in pairs if left != right), least)


def count_repeated(old: Sequence[_Part], new: Sequence[_Part], first: int) -> int:
    """Return how many characters of ``new`` behind the first difference are in ``old``, too.

    That is, behind it in ``old``, in a part that is the same, or at the end of the part that
    differs first.

    Args:
        old, new: the parts of two prompts.
        first: the number of the first part that differs.
    """
    if first == min(len(old), len(new)):
        return 0
    was, now = old[first].text, new[first].text
    shared = _first_difference(was, now)
    repeated = _length((Counter(old[first:]) & Counter(new[first:])).elements())
    if new[first] not in old[first:]:
        same_end = _first_difference(was[::-1], now[::-1])
        repeated += min(same_end, min(len(was), len(now)) - shared)
    return min(repeated, _length(new[first:]) - shared)
