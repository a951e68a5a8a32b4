"""Prompts with answers in them that are still being written, as text and as tokens; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from flashmoa.linking.prompt import Prompt
from flashmoa.linking.prompt_feed import Growing
from flashmoa.router.shell.agents import AgentAnswer


class Written(Growing, Protocol):
    """A prompt that is prefilled as it grows."""

    def whole(self) -> str | Sequence[int]:
        """All that is certain of it."""
        ...

    async def follow(self, answer: AgentAnswer, changed: Callable[[], None]) -> None:
        """Take an answer in, from its first piece to its last. Raises: what it failed with."""
        ...


class TextPrompt(Prompt):
    """A prompt in text form; its slots bear agents' names."""

    def whole(self) -> str:
        return self.stable()

    async def follow(self, answer: AgentAnswer, changed: Callable[[], None]) -> None:
        slots = [slot for slot in self.slots if slot.name == answer.name]
        async for piece in answer:
            for slot in slots:
                slot.append(piece)
            changed()
        for slot in slots:
            slot.close()
        changed()


class TokenPrompt:
    """A prompt in token form: nothing is tokenised twice (Faster-MoA §4.3).

    Args:
        parts: token ids, and agents by name; one may stand in several places.
    """

    def __init__(self, parts: Sequence[str | tuple[int, ...]]) -> None:
        self._parts = parts
        self._written: dict[str, list[int]] = {part: [] for part in parts if isinstance(part, str)}
        self._open = set(self._written)
        self._taken = 0

    @property
    def is_complete(self) -> bool:
        return not self._open

    def whole(self) -> list[int]:
        ids: list[int] = []
        for part in self._parts:
            ids += self._written[part] if isinstance(part, str) else part
            if part in self._open:
                break
        return ids

    def take(self) -> list[int]:
        new = self.whole()[self._taken :]
        self._taken += len(new)
        return new

    async def follow(self, answer: AgentAnswer, changed: Callable[[], None]) -> None:
        async for piece in answer.token_pieces():
            self._written[answer.name] += piece
            changed()
        self._open.discard(answer.name)
        changed()
