"""Find where prompts stopped sharing a prefix, and what that cost (``find_breaks``).

An engine reuses the KV of an earlier prompt up to the first token that differs. Users expect that
an agent's prompt begins with the one before it, and that agents share what is in all of their
prompts. A *break* is a place where that is not so.

Prompts are compared as the engine's chat template has rendered them, if that is given; else as
text made of what was sent, in the order in which most chat templates show it: the request's
settings, each tool, each message.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from flashmoa.linking.learned_texts import common_prefix
from flashmoa.observe.calls import Call
from flashmoa.observe.events import PromptSent
from flashmoa.observe.summary import seconds

HOW_TO_RECORD = "link(team, trace=FILE, trace_prompts=True)"
"""How prompts get into a trace."""

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

# The beginnings of prompts: each part leads to those that have followed it.
_Tree: TypeAlias = "dict[str, _Tree]"


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the engine's chat template renders it.

    Attributes:
        text: the prompt up to its last message.
        opening: the rest, with which the template opens the answer.
    """

    text: str
    opening: str


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
        is_rendered: whether these are as the engine rendered them.
        repeated: the share of the text behind the difference that is in the earlier prompt, too.
        token: the number of tokens in common, if known.
        prefill_seconds: the estimated time that computing the tokens again took, if known.
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
    is_rendered: bool
    repeated: float
    token: int | None = None
    prefill_seconds: float | None = None
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
        """Return where it differs, both texts there, and what that cost, in several lines."""
        same_agent = self.earlier.agent == self.call.agent
        other = "its prompt before" if same_agent else f"the prompt of {self.earlier.agent}"
        at = f"character {self.at:,} of {len(self.new):,}"
        if self.token is not None:
            at = f"token {self.token:,} ({at})"
        elif not self.is_rendered:
            at += " of its tools and messages"
        start = max(0, self.at - _SHOWN_CHARACTERS)
        common = ("…" if start else "") + self.new[start : self.at]
        lines = [
            f"{self.call.agent}, call {self.number}: {self.place} differs",
            f"  from {other} at {at}",
            f"  common  {common!r}",
            f"  before  {_beginning(self.old[self.at :])}",
            f"  now     {_beginning(self.new[self.at :])}",
            f"  cost    {self._cost()}",
        ]
        if self.times > 1:
            total = f"about {self.again_in_all:,} tokens computed again"
            lines.append(f"  {self.times} times in all, {total}")
        return "\n".join(lines)

    def _cost(self) -> str:
        usage, computed, again = self.call.usage, self.computed_tokens, self.again_tokens
        if usage is None:
            return "not known, as the engine reported no usage"
        if computed is None:
            text = f"about {again:,} of {usage.prompt_tokens:,} prompt tokens computed again"
        else:
            text = f"{computed:,} of {usage.prompt_tokens:,} prompt tokens computed"
            text += f", about {again:,} of them again"
        if usage.streamed_tokens:
            text += f" ({usage.streamed_tokens:,} ahead of the call)"
        if self.prefill_seconds is not None:
            text += f", which takes about {seconds(self.prefill_seconds)}"
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


def find_breaks(
    calls: Iterable[Call], rendered: Mapping[str, RenderedPrompt] | None = None
) -> list[PrefixBreak]:
    """Return the breaks of a run, in the order of its calls.

    An agent's prompt is compared with its prompt before, on the same engine and for the same model;
    an agent's first prompt with the latest ones of other agents there.

    Args:
        calls: the calls, in the order in which they started; those without a prompt do not count.
        rendered: the calls' prompts as the engine renders them, by ``call_id``, as far as known.
    """
    made: defaultdict[tuple[str, str], _EarlierPrompts] = defaultdict(_EarlierPrompts)
    found: list[PrefixBreak] = []
    for call in calls:
        if call.prompt is None:
            continue
        as_text = (rendered or {}).get(call.started.call_id)
        prompt = _ComparedPrompt(call, call.prompt, _parts(call.prompt), as_text)
        earlier = made[call.started.engine, call.started.model]
        expected = earlier.newest.get(call.agent) or earlier.find_expected(prompt)
        number = earlier.add(prompt)
        broken = _compare(expected, prompt, number) if expected is not None else None
        if broken is not None:
            found.append(broken)
    return found


@dataclass(frozen=True, slots=True)
class _ComparedPrompt:
    call: Call
    sent: PromptSent
    parts: list[str]
    rendered: RenderedPrompt | None


class _EarlierPrompts:
    """The prompts so far on one engine and for one model; ``newest`` has each agent's last one."""

    def __init__(self) -> None:
        self.newest: dict[str, _ComparedPrompt] = {}
        self._counts = Counter[str]()
        self._latest = deque[_ComparedPrompt](maxlen=_MOST_COMPARED)
        self._prefixes: _Tree = {}

    def add(self, prompt: _ComparedPrompt) -> int:
        """Add the next prompt. Return the number of its call among its agent's, from 1."""
        agent, tree = prompt.call.agent, self._prefixes
        for part in prompt.parts:
            tree = tree.setdefault(part, {})
        self._latest.append(prompt)
        self.newest[agent] = prompt
        self._counts[agent] += 1
        return self._counts[agent]

    def find_expected(self, prompt: _ComparedPrompt) -> _ComparedPrompt | None:
        """Return the one of the latest prompts with which an agent's first one could have shared
        much more than it did with any."""
        best, most = None, 0
        for other in self._latest:
            first = _first_difference(other.parts, prompt.parts)
            common = sum(map(len, prompt.parts[:first]))
            common += count_repeated(other.parts, prompt.parts, first)
            if common >= most:
                best, most = other, common
        return best if most - self._shared(prompt) >= _SHARED_CHARACTERS else None

    def _shared(self, prompt: _ComparedPrompt) -> int:
        """Return the most characters with which a prompt and an earlier one begin."""
        tree, shared = self._prefixes, 0
        for part in prompt.parts:
            if part not in tree:
                break
            tree = tree[part]
            shared += len(part)
        return shared


def _compare(earlier: _ComparedPrompt, later: _ComparedPrompt, number: int) -> PrefixBreak | None:
    """Return where a prompt leaves an earlier one; ``None`` if it begins with it, or is shorter."""
    before = _add_answer(earlier, later)
    old_parts, new_parts = _parts(before), later.parts
    first = _first_difference(old_parts, new_parts)
    is_rendered = earlier.rendered is not None and later.rendered is not None
    if earlier.rendered is not None and later.rendered is not None:
        old = earlier.rendered.text
        if before is not earlier.sent:
            old += earlier.rendered.opening + str(before.messages[-1]["content"])
        new = later.rendered.text + later.rendered.opening
    else:
        old, new = "\n".join(old_parts), "\n".join(new_parts)
    # KV is shared within a namespace only.
    at = common_prefix(old, new) if earlier.sent.namespace == later.sent.namespace else 0
    if at in (len(old), len(new)) or first == len(new_parts):
        return None
    if first == len(old_parts):
        repeated = (min(len(old), len(new)) - at) / (len(new) - at)
    else:
        behind = sum(map(len, new_parts[first:])) - common_prefix(
            old_parts[first], new_parts[first]
        )
        repeated = count_repeated(old_parts, new_parts, first) / behind if behind else 0.0
    place, remedy = _explain(before, later.sent)
    return PrefixBreak(
        call=later.call,
        earlier=earlier.call,
        number=number,
        place=place,
        remedy=remedy,
        old=old,
        new=new,
        at=at,
        is_rendered=is_rendered,
        repeated=repeated,
    )


def _add_answer(earlier: _ComparedPrompt, later: _ComparedPrompt) -> PromptSent:
    """Return an agent's prompt with its answer at the end, if the later one has a message there.

    The answer is in the engine's cache, too. What the model wrote for a tool call is not known.
    """
    prompt, finished = earlier.sent, earlier.call.finished
    rest = later.sent.messages[len(prompt.messages) :]
    has_answer = rest and rest[0].get("role") == "assistant" and not rest[0].get("tool_calls")
    if earlier.call.agent != later.call.agent or not has_answer:
        return prompt
    if finished is None or not finished.text:
        return prompt
    return replace(prompt, messages=[*prompt.messages, {**rest[0], "content": finished.text}])


def _explain(old: PromptSent, new: PromptSent) -> tuple[str, str]:
    """Return the first place at which two prompts differ, and what to do about it."""
    before, now = _settings(old), _settings(new)
    if _as_json(before) != _as_json(now):
        names = [name for name in before | now if before.get(name) != now.get(name)]
        place = f"the request's {' and '.join(names) or 'settings'}"
        return place, "send the same chat_template_kwargs, cache_salt, adapter, ... with each call"
    if _as_json(old.tools) != _as_json(new.tools):
        return (
            "the list of tools",
            "send the same tools in the same order with each call of an agent",
        )
    pairs = enumerate(zip(old.messages, new.messages, strict=False))
    for index, (was, message) in pairs:
        if _message_text(was) != _message_text(message):
            role = message.get("role")
            if role == "system":
                return "the system message", "put what differs at the end of the last message"
            return (
                f"message {index + 1} ({role})",
                "add messages at the end only, and send answers as the model wrote them",
            )
    return "what the chat template makes of the same messages", "use another --chat-template"


def _parts(prompt: PromptSent) -> list[str]:
    """Return the parts of a prompt as texts; the settings are left out if there are none."""
    settings = _settings(prompt)
    shown = [_as_json(settings)] if settings else []
    return [*shown, *map(_as_json, prompt.tools), *map(_message_text, prompt.messages)]


def _settings(prompt: PromptSent) -> dict[str, Any]:
    """Return what may change the beginning of a prompt besides its tools and messages."""
    options = {name: value for name, value in prompt.options.items() if name not in _SEEN_ELSEWHERE}
    return prompt.template_args | options | prompt.namespace


def _message_text(message: Mapping[str, Any]) -> str:
    """Return a message as text: its role, its content, and its other fields that are set."""
    content = message.get("content")
    text = content if isinstance(content, str) else _as_json(content) if content else ""
    fields = {
        name: value for name, value in message.items() if value and name not in ("role", "content")
    }
    return f"{message.get('role')}: {text}" + (f" {_as_json(fields)}" if fields else "")


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _first_difference(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the number of parts that two prompts have in common at their beginnings."""
    pairs = enumerate(zip(one, other, strict=False))
    least = min(len(one), len(other))
    return next((number for number, (left, right) in pairs if left != right), least)


def count_repeated(old: Sequence[str], new: Sequence[str], first: int) -> int:
    """Return how many characters of ``new`` behind the first difference are in ``old``, too.

    That is, behind it in ``old``, in a part that is the same, or at the end of the part that
    differs first.

    Args:
        old, new: the parts of two prompts.
        first: the number of the first part that differs.
    """
    if first == min(len(old), len(new)):
        return 0
    left = Counter(old[first:])
    total = 0
    for part in new[first:]:
        if left[part] > 0:
            left[part] -= 1
            total += len(part)
    was, now = old[first], new[first]
    shared = common_prefix(was, now)
    if now in old[first:]:
        return total - shared
    return total + min(common_prefix(was[::-1], now[::-1]), min(len(was), len(now)) - shared)
