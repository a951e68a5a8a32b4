"""Turn prompts into text (``prompt_parts``), and find how much two texts or prompts have in common.

Without the engine's chat template, a prompt is the list of its parts, in the order in which most
chat templates show them: the request's settings, each tool, each message.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flashmoa.observe.events import PromptSent

# The tools themselves show the first one; the others change the end of a prompt only.
_SEEN_ELSEWHERE = ("tool_choice", "continue_final_message", "add_generation_prompt")


def prompt_parts(prompt: PromptSent) -> list[str]:
    """Return the parts of a prompt as texts; the settings are left out if there are none."""
    text = settings_text(prompt)
    tools = [as_json(tool) for tool in prompt.tools]
    return [*([text] if text else []), *tools, *map(message_text, prompt.messages)]


def settings(prompt: PromptSent) -> dict[str, Any]:
    """Return what may change the beginning of a prompt besides its tools and messages."""
    options = {name: value for name, value in prompt.options.items() if name not in _SEEN_ELSEWHERE}
    return prompt.template_args | options | prompt.namespace


def settings_text(prompt: PromptSent) -> str:
    """Return a prompt's settings as text; empty if there are none."""
    return as_json(settings(prompt)) if settings(prompt) else ""


def message_text(message: Mapping[str, Any]) -> str:
    """Return a message as text: its role, its content, and its other fields that are set."""
    content = message.get("content")
    text = content if isinstance(content, str) else as_json(content) if content else ""
    fields = {
        name: value for name, value in message.items() if value and name not in ("role", "content")
    }
    return f"{message.get('role')}: {text}" + (f" {as_json(fields)}" if fields else "")


def as_json(value: object) -> str:
    """Return a value as JSON, its keys in their order."""
    return json.dumps(value, ensure_ascii=False, default=str)


def common_prefix(one: str, other: str) -> int:
    """Return the number of characters that two texts have in common at their beginnings."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def first_difference(one: Sequence[str], other: Sequence[str]) -> int:
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


def share_repeated(old: Sequence[str], new: Sequence[str], first: int) -> float:
    """Return :func:`count_repeated` as a share of the text of ``new`` behind the difference."""
    if first == min(len(old), len(new)):
        return 0.0
    behind = sum(map(len, new[first:])) - common_prefix(old[first], new[first])
    return count_repeated(old, new, first) / behind if behind else 0.0
