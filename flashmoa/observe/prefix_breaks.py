"""Find where prompts stopped sharing a prefix, and what that cost (``find_breaks``).

An engine reuses the KV of an earlier prompt up to the first token that differs. Users expect that
each prompt of an agent begins with its previous prompt, and that agents share what all of their
prompts contain. A *break* is a place where the prompts differ instead.

Prompts are compared as text, in the order of most chat templates: the request's settings, each
tool, each message. Changes that a chat template makes are not seen.
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

# Prefilling fewer tokens takes about as long as prefilling a single token.
_MIN_TOKENS = 32
NO_BREAK = f"no prompt had {_MIN_TOKENS} tokens or more computed again as its prefix broke"
_SHOWN_CHARACTERS = 48
# Left out: the tools themselves show tool_choice; the others change only the end of a prompt.
_NOT_COMPARED = ("tool_choice", "continue_final_message", "add_generation_prompt")

# What to do about a difference, by the kind of the part that differs.
_REMEDIES = {
    "setting": "send the same chat_template_kwargs, cache_salt, adapter, ... with each call",
    "tool": "send the same tools in the same order with each call of an agent",
    "system": "put what differs at the end of the last message",
    "message": "add messages at the end only, and send answers as the model wrote them",
}


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a prompt. Parts with the same text are equal."""

    text: str
    place: str = field(compare=False)
    kind: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    """A prompt that leaves the text of an earlier prompt, although it repeats much of that text.

    Attributes:
        call, earlier: the calls whose prompts were compared.
        number: the number of ``call`` among the calls of its agent, from 1.
        place: the part that differs first, for instance ``the system message``.
        remedy: what to do about it.
        old, new: the texts of the earlier and the later prompt. ``old`` ends with the agent's
            answer if the later prompt has a message in its place.
        at: the number of characters that ``old`` and ``new`` have in common at their beginnings.
        repeated: the share of the text behind the difference that the earlier prompt has, too.
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
        """Prompt tokens that the engine computed for the call or its link, if known."""
        usage = self.call.usage
        if usage is None or usage.cached_tokens is None:
            return None
        return usage.prompt_tokens - usage.cached_tokens + (usage.streamed_tokens or 0)

    @property
    def again_tokens(self) -> int | None:
        """Estimate of the computed tokens that the engine had computed for the earlier prompt."""
        usage, computed = self.call.usage, self.computed_tokens
        if usage is None:
            return None
        behind = usage.prompt_tokens * (len(self.new) - self.at) / len(self.new)
        # Engines evict KV, so that more tokens may have been computed than the text behind has.
        return round(self.repeated * (behind if computed is None else min(behind, computed)))

    @property
    def is_of_one_agent(self) -> bool:
        """Whether both prompts are the same agent's."""
        return self.call.agent == self.earlier.agent

    def describe(self) -> str:
        """Return lines for readers: where the prompts differ, what that cost and what to do."""
        agent = self.earlier.agent
        other = "its prompt before" if self.is_of_one_agent else f"the prompt of {agent}"
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
        again = f"about {self.again_tokens:,} of {usage.prompt_tokens:,}"
        text = f"{again} prompt tokens computed again"
        if computed is not None:
            text += f" ({computed:,} computed, {usage.streamed_tokens or 0:,} ahead of the call)"
        if self.call.wait is not None:
            text += f"; first token after {seconds(self.call.wait)}"
        return text


def _beginning(text: str) -> str:
    more = "…" if len(text) > _SHOWN_CHARACTERS else ""
    return repr(text[:_SHOWN_CHARACTERS] + more) if text else "(its end)"


def group_breaks(breaks: Iterable[PrefixBreak]) -> list[PrefixBreak]:
    """Return the costliest break of each agent and remedy, the agents that lost most first.

    Breaks that cost almost nothing are left out. ``times`` is the number of breaks in the group,
    ``again_in_all`` the sum of their tokens.
    """
    groups: defaultdict[object, list[PrefixBreak]] = defaultdict(list)
    for one in breaks:
        if one.again_tokens is None or one.again_tokens >= _MIN_TOKENS:
            key = (one.call.agent, one.call.started.engine, one.is_of_one_agent, one.remedy)
            groups[key].append(one)
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

    Prompts are compared on one engine, for one model: each prompt of an agent with its previous
    prompt, and the first prompt of an agent with the latest prompts of other agents.

    Args:
        calls: calls in starting order; calls without a prompt do not count.
    """
    # A trace may name a new agent for each call: comparing all pairs would take minutes.
    latest: defaultdict[object, deque[_SentPrompt]] = defaultdict(lambda: deque(maxlen=32))
    newest: dict[object, _SentPrompt] = {}
    counts = Counter[object]()
    found: list[PrefixBreak] = []
    for call in calls:
        if call.prompt is None:
            continue
        prompt = _SentPrompt(call, call.prompt.messages, _parts(call.prompt))
        where = (call.started.engine, call.started.model)
        agent = (call.agent, where)
        counts[agent] += 1
        expected = newest.get(agent) or _find_expected(latest[where], prompt)
        broken = _compare(expected, prompt, counts[agent]) if expected is not None else None
        if broken is not None:
            found.append(broken)
        newest[agent] = prompt
        latest[where].append(prompt)
    return found


@dataclass(frozen=True, slots=True)
class _SentPrompt:
    call: Call
    messages: list[dict[str, Any]]
    parts: list[_Part]


def _find_expected(latest: Iterable[_SentPrompt], prompt: _SentPrompt) -> _SentPrompt | None:
    """Return an earlier prompt that could have shared much more text than any prompt did."""
    best, most, shared = None, 0, 0
    for other in latest:
        first = _first_difference(other.parts, prompt.parts)
        common = _length(prompt.parts[:first])
        shared = max(shared, common)
        common += count_repeated(other.parts, prompt.parts, first)
        if common >= most:
            best, most = other, common
    # Prompts repeat some words of each other by chance.
    is_much = most - shared >= 1000  # Characters.
    return best if is_much else None


def _compare(earlier: _SentPrompt, later: _SentPrompt, number: int) -> PrefixBreak | None:
    """Return the break between two prompts; ``None`` if one begins with the other."""
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
    # If the parts have different kinds, the kind that comes first in prompts is the reason.
    differs = min(now, was, key=lambda part: (part.kind != "setting", part.kind != "tool"))
    repeated = count_repeated(old_parts, new_parts, first)
    return PrefixBreak(
        call=later.call,
        earlier=earlier.call,
        number=number,
        place=differs.place,
        remedy=_REMEDIES[differs.kind],
        old=old,
        new=new,
        at=at,
        repeated=repeated / (_length(new_parts[first:]) - shared),
    )


def _with_answer(earlier: _SentPrompt, later: _SentPrompt) -> list[_Part]:
    """Return an agent's earlier prompt, with its answer if the later prompt has a message there.

    The engine's cache has the answer, too. The text of a tool call is not known.
    """
    finished, number = earlier.call.finished, len(earlier.messages)
    answer = later.messages[number] if len(later.messages) > number else {}
    is_answer = answer.get("role") == "assistant" and not answer.get("tool_calls")
    if earlier.call.agent != later.call.agent or not is_answer or not finished or not finished.text:
        return earlier.parts
    return [*earlier.parts, _message_part(number, {**answer, "content": finished.text})]


def _parts(prompt: PromptSent) -> list[_Part]:
    return [
        *(
            _Part(f"{name}: {_as_json(value)}", f"the request's {name}", "setting")
            for name, value in sorted(prompt.settings.items())
            if name not in _NOT_COMPARED
        ),
        *(_Part(_as_json(tool), "the list of tools", "tool") for tool in prompt.tools),
        *(_message_part(number, message) for number, message in enumerate(prompt.messages)),
    ]


def _message_part(index: int, message: Mapping[str, Any]) -> _Part:
    """Return a message as text: its role, its content and its other fields."""
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
    """Return the index of the first item that differs."""
    pairs = enumerate(zip(one, other, strict=False))
    least = min(len(one), len(other))
    return next((number for number, (left, right) in pairs if left != right), least)


def count_repeated(old: Sequence[_Part], new: Sequence[_Part], first: int) -> int:
    """Return how many characters of ``new`` behind the first difference are in ``old``, too.

    These are the parts that both have, and the common end of the parts that differ first.

    Args:
        old, new: the parts of two prompts.
        first: the index of the first part that differs.
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
