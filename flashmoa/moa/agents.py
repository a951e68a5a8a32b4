"""Agents of a mixture or a debate: ``Model``, and helpers for reading and timing its answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import anyio

from flashmoa import EngineClient, Text, UpstreamCancelled
from flashmoa.engine import EngineError, PluginMissing
from flashmoa.moa.results import AgentAnswer, MixtureFailed
from flashmoa.observe import CallFinished, CallStarted, Event, FirstToken

# Tokens of context that are kept free for an answer whose max_tokens is not set.
_DEFAULT_ANSWER_TOKENS = 1024
# The context length that each engine reported; None for an engine without the plugin.
_CONTEXT_LENGTHS: WeakKeyDictionary[EngineClient, int | None] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Model:
    """A model on an engine.

    Attributes:
        model: the name under which the engine serves it.
        sampling: parameters of chat completions (``temperature``, ``max_tokens``, ...), and
            SGLang's own.
    """

    engine: EngineClient
    model: str = "default"
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def max_tokens(self) -> int | None:
        """Return how many tokens an answer may have, ``None`` if ``sampling`` does not limit it."""
        return self.sampling.get("max_completion_tokens") or self.sampling.get("max_tokens")

    async def free_tokens(
        self, empty_prompt: Sequence[Mapping[str, Any]], answer_limits: Sequence[int | None]
    ) -> int | None:
        """Return how many tokens of context a prompt leaves for the answers in it.

        Args:
            empty_prompt: the prompt without the answers.
            answer_limits: for each answer, how many tokens it can have; ``None`` if unknown.

        Returns: ``None`` if the answers certainly fit, or if the engine does not report how long
            its context is.

        Raises: EngineError if the engine cannot tokenise the prompt.
        """
        context = await self.context_length()
        if context is None:
            return None
        free = context - (self.max_tokens or _DEFAULT_ANSWER_TOKENS)
        if None not in answer_limits:
            needed = sum(limit or 0 for limit in answer_limits)
            if needed + _upper_bound(empty_prompt) <= free:
                return None
        return max(0, free - await self._count_tokens(empty_prompt))

    async def context_length(self) -> int | None:
        """Return the engine's context length in tokens, ``None`` if it does not report it."""
        if self.engine not in _CONTEXT_LENGTHS:
            try:
                _CONTEXT_LENGTHS[self.engine] = (await self.engine.info()).context_length
            except PluginMissing:
                _CONTEXT_LENGTHS[self.engine] = None
            except EngineError:
                return None
        return _CONTEXT_LENGTHS[self.engine]

    async def fits(self, prompt: Sequence[Mapping[str, Any]], context: int) -> bool:
        """Return whether a context has room for a prompt and a whole answer after it.

        Args:
            context: number of tokens in the context.
        """
        free = context - (self.max_tokens or _DEFAULT_ANSWER_TOKENS)
        if _upper_bound(prompt) <= free:
            return True
        try:
            return await self._count_tokens(prompt) <= free
        except EngineError:
            return True  # If there is too little room, the engine will refuse the request itself.

    async def _count_tokens(self, prompt: Sequence[Mapping[str, Any]]) -> int:
        template_args = self.sampling.get("chat_template_kwargs")
        return len(await self.engine.tokenize_chat(list(prompt), template_args=template_args))


def _upper_bound(prompt: Sequence[Mapping[str, Any]]) -> int:
    """Return how many tokens a prompt can have at most."""
    # A token has at least one byte, and a chat template adds fewer than 256 tokens.
    return sum(len(str(message["content"]).encode()) for message in prompt) + 256


async def room_for_answers(
    readers: Iterable[Model],
    empty_prompt: Sequence[Mapping[str, Any]],
    answer_limits: Sequence[int | None],
) -> int | None:
    """Return how many tokens of answers fit into the prompt of every reader; ``None``: all fit.

    The arguments are those of :meth:`Model.free_tokens`. An engine that does not answer is left
    out. If it has too little room, it will refuse the reader's request itself.
    """
    rooms: list[int] = []
    for reader in {(reader.engine.url, reader.model): reader for reader in readers}.values():
        try:
            room = await reader.free_tokens(empty_prompt, answer_limits)
        except EngineError:
            continue
        if room is not None:
            rooms.append(room)
    return min(rooms, default=None)


async def read_with_timeout(text: Text, stall_seconds: float | None) -> AsyncGenerator[str]:
    """Yield a text's pieces as they are written.

    Args:
        stall_seconds: how long to wait for the next piece once the text has begun; ``None`` for
            no limit.

    Raises:
        TimeoutError: if no piece was written for ``stall_seconds``.
        Exception: the text's error, if it failed.
    """
    pieces, timeout, piece = aiter(text), None, None
    while True:
        with anyio.move_on_after(timeout) as waiting:
            piece = await anext(pieces, None)
        if waiting.cancelled_caught:
            raise TimeoutError(f"it stalled: nothing came for {timeout:g} s")
        if piece is None:
            return
        timeout = stall_seconds
        yield piece


@contextmanager
def raise_as_mixture_failed(agent: str) -> Generator[None]:
    """Turn an error of the agent that writes the last answer into a :class:`MixtureFailed`."""
    try:
        yield
    except (MixtureFailed, UpstreamCancelled):
        raise
    except Exception as error:
        raise MixtureFailed(f"{agent} failed: {error}") from error


class CallTimes:
    """Records when agents' calls began and ended, as the listener of a workflow."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._finished: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        """Record the time of an event."""
        if isinstance(event, CallStarted):
            self._started[event.agent] = event.at
        elif isinstance(event, FirstToken):
            self._first[event.agent] = event.at
        elif isinstance(event, CallFinished):
            self._finished[event.agent] = event.at

    def fill(self, record: AgentAnswer, agent: str) -> None:
        """Set the times of an agent's record."""
        record.started = self._started.get(agent)
        record.first_token = self._first.get(agent)
        record.finished = self._finished.get(agent)
