"""Keep the prompts of a run (``EarlierPrompts``), to find those that a new one is compared with."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TypeAlias

from flashmoa.observe.calls import Call
from flashmoa.observe.events import PromptSent
from flashmoa.observe.prompt_text import count_repeated, first_difference

# Of how much text agents must have in common, behind a difference, to be expected to share it.
_SHARED_CHARACTERS = 1000
# With how many other prompts an agent's first one is compared. In a trace where each call has an
# agent's name of its own, all pairs would take minutes.
_MOST_COMPARED = 32

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
class ComparedPrompt:
    """A call's prompt: as it was sent, its parts, and as the engine renders it, if known."""

    call: Call
    sent: PromptSent
    parts: list[str]
    rendered: RenderedPrompt | None


class EarlierPrompts:
    """The prompts so far on one engine and for one model.

    Attributes:
        newest: each agent's newest prompt.
    """

    def __init__(self) -> None:
        self.newest: dict[str, ComparedPrompt] = {}
        self._counts = Counter[str]()
        self._latest = deque[ComparedPrompt](maxlen=_MOST_COMPARED)
        self._prefixes: _Tree = {}

    def add(self, prompt: ComparedPrompt) -> int:
        """Add the next prompt. Return the number of its call among its agent's, from 1."""
        agent, tree = prompt.call.agent, self._prefixes
        for part in prompt.parts:
            tree = tree.setdefault(part, {})
        self._latest.append(prompt)
        self.newest[agent] = prompt
        self._counts[agent] += 1
        return self._counts[agent]

    def find_expected(self, prompt: ComparedPrompt) -> ComparedPrompt | None:
        """Return the one of the latest prompts with which an agent's first one could have shared
        much more than it did with any."""
        best, most = None, 0
        for other in self._latest:
            first = first_difference(other.parts, prompt.parts)
            common = sum(map(len, prompt.parts[:first]))
            common += count_repeated(other.parts, prompt.parts, first)
            if common >= most:
                best, most = other, common
        return best if most - self._shared(prompt) >= _SHARED_CHARACTERS else None

    def _shared(self, prompt: ComparedPrompt) -> int:
        """Return the most characters with which a prompt and an earlier one begin."""
        tree, shared = self._prefixes, 0
        for part in prompt.parts:
            if part not in tree:
                break
            tree = tree[part]
            shared += len(part)
        return shared
