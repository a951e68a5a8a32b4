"""Who takes part: models on engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashmoa.engine import EngineClient, EngineError, PromptTooLarge

# Tokens kept free for an aggregator that is not told how many it may write.
_RESERVE = 1024


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

        Returns: ``None`` where they cannot need as many as there are. Raises: EngineError.
        """
        context = (await self.engine.info()).context_length
        free = context - (self.max_tokens or _RESERVE)
        if None not in most and sum(one or 0 for one in most) + _longest(empty) <= free:
            return None
        prompt = await self.engine.prefill_only(messages=list(empty))
        return max(0, free - prompt.prompt_tokens)

    async def context_length(self) -> int | None:
        """Of its engine, in tokens; ``None`` where that does not say."""
        try:
            return (await self.engine.info()).context_length
        except EngineError:
            return None

    async def fits(self, prompt: Sequence[Mapping[str, Any]], context: int) -> bool:
        """Whether all that it may write has room behind a prompt."""
        free = context - (self.max_tokens or _RESERVE)
        if _longest(prompt) <= free:
            return True
        try:
            return (await self.engine.prefill_only(messages=list(prompt))).prompt_tokens <= free
        except PromptTooLarge:
            return False
        except EngineError:
            return True  # It cannot be asked; if there is not enough, the request will say so.


def _longest(prompt: Sequence[Mapping[str, Any]]) -> int:
    """Tokens that a prompt can have at most."""
    # No token is shorter than a byte; what a template adds is less than the rest.
    return sum(len(str(message["content"]).encode()) for message in prompt) + 256
