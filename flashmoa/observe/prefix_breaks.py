"""Find where prompts stopped sharing a prefix, why, and what that cost (``find_breaks``).

An engine reuses the KV of an earlier prompt up to the first token that differs. Users expect that
an agent's prompt begins with the one before it, and that agents share what is in all of their
prompts. A *break* is a place where that is not so.

Prompts are compared as the engine's chat template has rendered them, if that is given; else as
text made of what was sent, in the order in which most chat templates show it: tools, then messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from flashmoa.observe.calls import Call
from flashmoa.observe.earlier_prompts import ComparedPrompt, EarlierPrompts, RenderedPrompt
from flashmoa.observe.events import PromptSent
from flashmoa.observe.prompt_changes import REMEDIES, Change, explain_difference, find_changes
from flashmoa.observe.prompt_text import (
    common_prefix,
    first_difference,
    prompt_parts,
    share_repeated,
)
from flashmoa.observe.summary import seconds

HOW_TO_RECORD = "link(team, trace=FILE, trace_prompts=True)"
"""How prompts get into a trace."""

# Prefilling fewer tokens takes about as long as prefilling one.
_FEWEST_TOKENS = 32
NO_BREAK = f"no prompt had {_FEWEST_TOKENS} tokens or more computed again as its prefix broke"
_SHOWN_CHARACTERS = 48


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    """A prompt that does not begin as an earlier one does, although much of it is the same.

    Attributes:
        call, earlier: the call with the prompt, and the one whose prompt it is compared with.
        number: the number of the call among its agent's, from 1.
        old, new: the texts of the prompts that were compared. ``old`` includes the agent's answer,
            if the later prompt has a message in its place.
        at: the number of characters that these have in common at their beginnings.
        is_rendered: whether these are as the engine rendered them.
        changes: what differs.
        repeated: the share of the text behind the difference that is in the earlier prompt, too.
        token: the number of tokens in common, if known.
        prefill_seconds: the estimated time that computing the tokens again took, if known.
    """

    call: Call
    earlier: Call
    number: int
    old: str = field(repr=False)
    new: str = field(repr=False)
    at: int
    is_rendered: bool
    changes: tuple[Change, ...]
    repeated: float
    token: int | None = None
    prefill_seconds: float | None = None

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

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return "; ".join(dict.fromkeys(REMEDIES[change.kind] for change in self.changes))

    def describe(self) -> str:
        """Return what differs, where, and what that cost, in several lines."""
        start = max(0, self.at - _SHOWN_CHARACTERS)
        common = ("…" if start else "") + self.new[start : self.at]
        return "\n".join(
            (
                f"{self.call.agent}, call {self.number}: "
                + ", and ".join(change.text for change in self.changes),
                f"  differs from {self._name_earlier()} at {self._place()}",
                f"  common  {common!r}",
                f"  before  {_beginning(self.old[self.at :])}",
                f"  now     {_beginning(self.new[self.at :])}",
                f"  cost    {self._cost()}",
            )
        )

    def _name_earlier(self) -> str:
        if self.earlier.agent == self.call.agent:
            return "its prompt before"
        return f"the prompt of {self.earlier.agent}"

    def _place(self) -> str:
        characters = f"character {self.at:,} of {len(self.new):,}"
        if self.token is not None:
            return f"token {self.token:,} ({characters})"
        return characters if self.is_rendered else f"{characters} of its tools and messages"

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


@dataclass(frozen=True, slots=True)
class BreakGroup:
    """The breaks of one agent for the same reasons; ``worst`` is the costliest."""

    worst: PrefixBreak
    count: int
    again_tokens: int

    def describe(self) -> str:
        """Return the description of the costliest one, and how many there are."""
        if self.count == 1:
            return self.worst.describe()
        total = f"  {self.count} times in all, about {self.again_tokens:,} tokens computed again"
        return f"{self.worst.describe()}\n{total}"


def group_breaks(breaks: Iterable[PrefixBreak]) -> list[BreakGroup]:
    """Return the breaks that cost something, grouped by agent and reason, the costliest first."""
    by_reason: defaultdict[object, list[PrefixBreak]] = defaultdict(list)
    for one in breaks:
        if one.again_tokens is None or one.again_tokens >= _FEWEST_TOKENS:
            kinds = tuple(change.kind for change in one.changes)
            same_agent = one.call.agent == one.earlier.agent
            by_reason[one.call.agent, one.call.started.engine, same_agent, kinds].append(one)
    groups = [
        BreakGroup(
            max(members, key=lambda one: one.again_tokens or 0),
            len(members),
            sum(one.again_tokens or 0 for one in members),
        )
        for members in by_reason.values()
    ]
    return sorted(groups, key=lambda group: -group.again_tokens)


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
    made: defaultdict[tuple[str, str], EarlierPrompts] = defaultdict(EarlierPrompts)
    found: list[PrefixBreak] = []
    for call in calls:
        if call.prompt is None:
            continue
        as_text = (rendered or {}).get(call.started.call_id)
        prompt = ComparedPrompt(call, call.prompt, prompt_parts(call.prompt), as_text)
        earlier = made[call.started.engine, call.started.model]
        expected = earlier.newest.get(call.agent) or earlier.find_expected(prompt)
        number = earlier.add(prompt)
        broken = _compare(expected, prompt, number) if expected is not None else None
        if broken is not None:
            found.append(broken)
    return found


def _compare(earlier: ComparedPrompt, later: ComparedPrompt, number: int) -> PrefixBreak | None:
    """Return where a prompt leaves an earlier one; ``None`` if it begins with it, or is shorter."""
    before = _add_answer(earlier, later)
    old_parts, new_parts = prompt_parts(before), later.parts
    first = first_difference(old_parts, new_parts)
    is_rendered = earlier.rendered is not None and later.rendered is not None
    if earlier.rendered is not None and later.rendered is not None:
        old = _expected_text(earlier.rendered, earlier.sent, before)
        new = later.rendered.text + later.rendered.opening
    else:
        old, new = "\n".join(old_parts), "\n".join(new_parts)
    # KV is shared within a namespace only.
    at = common_prefix(old, new) if earlier.sent.namespace == later.sent.namespace else 0
    if at in (len(old), len(new)) or first == len(new_parts):
        return None
    changes = find_changes(before, later.sent)
    repeated = share_repeated(old_parts, new_parts, first)
    if not changes:
        explained = explain_difference(old, new, at) or Change("text", "other text")
        where = "in what the chat template makes of the same messages"
        changes = [Change(explained.kind, f"{explained.text} {where}")]
        repeated = (min(len(old), len(new)) - at) / (len(new) - at)
    return PrefixBreak(
        call=later.call,
        earlier=earlier.call,
        number=number,
        old=old,
        new=new,
        at=at,
        is_rendered=is_rendered,
        changes=tuple(changes),
        repeated=repeated,
    )


def _add_answer(earlier: ComparedPrompt, later: ComparedPrompt) -> PromptSent:
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


def _expected_text(rendered: RenderedPrompt, prompt: PromptSent, with_answer: PromptSent) -> str:
    """Return the text with which an agent's next prompt should begin."""
    if with_answer is prompt:
        # No answer follows in the later prompt, so what opens it is not there either.
        return rendered.text
    return rendered.text + rendered.opening + str(with_answer.messages[-1]["content"])
