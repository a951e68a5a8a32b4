"""Who takes part: models on engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from flashmoa.engine import EngineClient, EngineError, PluginMissing

# Tokens kept free for an aggregator that is not told how many it may write.
_RESERVE = 1024
# Context lengths of engines, which are asked once; ``None``: it has no plugin to say it.
_CONTEXTS: WeakKeyDictionary[EngineClient, int | None] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Model:
    """A model on an engine. ``sampling``: parameters of chat completions (``temperature``,
    ``max_tokens``, ...), and SGLang's own."""

    engine: EngineClient
    model: str = "default"
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def max_tokens(self) -> int | None:
        return self.sampling.get("max_completion_tokens") or self.sampling.get("max_tokens")

    async def free_tokens(
        self, empty: Sequence[Mapping[str, Any]], most: Sequence[int | None]
    ) -> int | None:
        """Tokens of context that its prompt leaves for answers in it.

        Args:
            empty: the prompt without the answers.
            most: what each of them can be at most, if that is known.

        Returns: ``None`` where they cannot need as many as there are, and where its engine does
        not say how many that are. Raises: EngineError.
        """
        context = await self.context_length()
        if context is None:
            return None
        free = context - (self.max_tokens or _RESERVE)
        if None not in most and sum(one or 0 for one in most) + _longest(empty) <= free:
            return None
        return max(0, free - await self._count(empty))

    async def context_length(self) -> int | None:
        """Of its engine, in tokens; ``None`` where that does not say."""
        if self.engine not in _CONTEXTS:
            try:
                _CONTEXTS[self.engine] = (await self.engine.info()).context_length
            except PluginMissing:
                _CONTEXTS[self.engine] = None
            except EngineError:
                return None
        return _CONTEXTS[self.engine]

    async def fits(self, prompt: Sequence[Mapping[str, Any]], context: int) -> bool:
        """Whether all that it may write has room behind a prompt."""
        free = context - (self.max_tokens or _RESERVE)
        if _longest(prompt) <= free:
            return True
        try:
            return await self._count(prompt) <= free
        except EngineError:
            return True  # It cannot be asked; if there is not enough, the request will say so.

    async def _count(self, prompt: Sequence[Mapping[str, Any]]) -> int:
        """Tokens of a prompt. Raises: EngineError."""
        template_args = self.sampling.get("chat_template_kwargs")
        return len(await self.engine.tokenize_chat(list(prompt), template_args=template_args))


def _longest(prompt: Sequence[Mapping[str, Any]]) -> int:
    """Tokens that a prompt can have at most."""
    # No token is shorter than a byte; what a template adds is less than the rest.
    return sum(len(str(message["content"]).encode()) for message in prompt) + 256
