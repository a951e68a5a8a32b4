"""Describe agents' models (``Model``), how much their contexts hold, and which engines answer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio

from flashmoa import EngineClient
from flashmoa.engine import prompt_fields
from flashmoa.errors import EngineError
from flashmoa.moa.settings import TOKEN_LIMITS, Limits, token_limit

# How long an engine may take to count a prompt's tokens, or to report its context. Without an
# answer nothing is cut.
_COUNT_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Model:
    """An agent's model on an engine, and how it is asked.

    Attributes:
        model: the name under which its engines serve it.
        sampling: parameters of chat completions (``temperature``, ``max_tokens``, ``seed``, ...),
            and SGLang's own.
        backups: other engines that serve it. A request that fails is repeated on them in turn. An
            engine that did not answer is asked last for a minute.
        limits: its own limits; by default the limits of the mixture, staircase or debate.
        role: text at the beginning of this agent's system message.
    """

    engine: EngineClient
    model: str = "default"
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    backups: Sequence[EngineClient] = ()
    limits: Limits | None = None
    role: str = ""

    def with_sampling(self, sampling: Mapping[str, Any] | None) -> Model:
        """Return the model with parameters in place of its own."""
        own, given = dict(self.sampling), sampling or {}
        if any(given.get(name) is not None for name in TOKEN_LIMITS):
            own = {name: value for name, value in own.items() if name not in TOKEN_LIMITS}
        return replace(self, sampling={**own, **given}) if given else self

    def with_silent_engines_last(self) -> Model:
        """Return the model with the engines last that did not answer lately."""
        now, engines = time.monotonic(), [self.engine, *self.backups]
        first, *others = sorted(engines, key=lambda engine: (engine.avoided_until or 0.0) > now)
        return replace(self, engine=first, backups=others)

    @property
    def max_tokens(self) -> int | None:
        """Return how many tokens an answer may have, ``None`` if ``sampling`` does not limit it."""
        return token_limit(self.sampling)

    @property
    def answer_tokens(self) -> int:
        """Return how many tokens of the context are kept free for an answer."""
        return self.max_tokens or 1024

    async def free_tokens(
        self, empty_prompt: Sequence[Mapping[str, Any]], answer_limits: Sequence[int | None]
    ) -> int | None:
        """Return how many tokens of context a prompt leaves for the answers in it.

        Args:
            empty_prompt: the prompt without the answers.
            answer_limits: the largest number of tokens of each answer; ``None`` if unknown.

        Returns: ``None`` if the answers certainly fit, or if the engine does not report the length
            of its context.

        Raises: EngineError or TimeoutError if the engine cannot tokenise the prompt.
        """
        context = await self.context_length()
        if context is None:
            return None
        free = context - self.answer_tokens
        if None not in answer_limits:
            needed = sum(limit or 0 for limit in answer_limits)
            if needed + self._upper_bound(empty_prompt) <= free:
                return None
        return max(0, free - await self._count_tokens(empty_prompt))

    async def context_length(self) -> int | None:
        """Return its context length in tokens, ``None`` if the engine does not report it."""
        try:
            with anyio.fail_after(_COUNT_TIMEOUT_SECONDS):
                return await self.engine.context_length(self.model)
        except (EngineError, TimeoutError):
            return None  # An engine that does not answer now is asked again next time.

    async def fits(self, prompt: Sequence[Mapping[str, Any]], context: int) -> bool:
        """Return whether a context of that many tokens has room for a prompt and its answer."""
        free = context - self.answer_tokens
        try:
            return self._upper_bound(prompt) <= free or await self._count_tokens(prompt) <= free
        except (EngineError, TimeoutError):
            return True  # If there is too little room, the engine will refuse the request itself.

    def _upper_bound(self, prompt: Sequence[Mapping[str, Any]]) -> int:
        """Return an upper bound of a prompt's tokens."""
        # A token has at least one byte, and a chat template adds fewer than 256 tokens. Templates
        # write other fields, too, such as tool calls, and tools.
        parts = [*prompt, *(self.sampling.get("tools") or ())]
        return sum(len(str(part).encode(errors="replace")) for part in parts) + 256

    async def _count_tokens(self, prompt: Sequence[Mapping[str, Any]]) -> int:
        fields = prompt_fields(self.sampling)
        with anyio.fail_after(_COUNT_TIMEOUT_SECONDS):
            return len(await self.engine.tokenize_chat(list(prompt), **fields))


@dataclass(frozen=True, slots=True)
class Fallback:
    """Who answers if the last aggregator fails.

    Attributes:
        models: other last aggregators, asked in turn. They read the answers of the last layer that
            has any, and continue the aggregator's text.
        best_answer: whether the best of these answers is the result if no aggregator could answer.
    """

    models: Sequence[Model] = ()
    best_answer: bool = True


async def room_for_answers(
    readers: Iterable[Model],
    empty_prompt: Sequence[Mapping[str, Any]],
    answer_limits: Sequence[int | None],
) -> int | None:
    """Return how many tokens of answers fit into the prompt of every reader; ``None``: all fit.

    Arguments: see :meth:`Model.free_tokens`. An engine that does not answer is left out. If it has
    too little room, it will refuse the reader's request itself.
    """
    rooms: list[int] = []
    # Among readers with the same context, the reader with the longest answer has the least room.
    by_answer = sorted(readers, key=lambda reader: reader.answer_tokens)
    for reader in {(reader.engine.url, reader.model): reader for reader in by_answer}.values():
        try:
            room = await reader.free_tokens(empty_prompt, answer_limits)
        except (EngineError, TimeoutError):
            continue
        if room is not None:
            rooms.append(room)
    return min(rooms, default=None)
