"""The agents of a mixture or a debate: models on engines, and what one answer of them needs."""

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

# Tokens of context kept free for an aggregator whose max_tokens is not set.
_RESERVE = 1024
# The context length of each engine, asked for once; ``None``: the engine has no plugin to say it.
_CONTEXTS: WeakKeyDictionary[EngineClient, int | None] = WeakKeyDictionary()


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
        """Return how many tokens an answer may have, if ``sampling`` limits it."""
        return self.sampling.get("max_completion_tokens") or self.sampling.get("max_tokens")

    async def free_tokens(
        self, empty_prompt: Sequence[Mapping[str, Any]], answer_limits: Sequence[int | None]
    ) -> int | None:
        """Return how many tokens of context a prompt leaves for the answers in it.

        Args:
            empty_prompt: the prompt without the answers.
            answer_limits: how many tokens each answer can have, if that is known.

        Returns: ``None`` if the answers certainly fit, or if the engine does not say how long its
            context is.

        Raises: EngineError.
        """
        context = await self.context_length()
        if context is None:
            return None
        free = context - (self.max_tokens or _RESERVE)
        if None not in answer_limits:
            needed = sum(limit or 0 for limit in answer_limits)
            if needed + _upper_bound(empty_prompt) <= free:
                return None
        return max(0, free - await self._count(empty_prompt))

    async def context_length(self) -> int | None:
        """Return the engine's context length in tokens, ``None`` if it does not say."""
        if self.engine not in _CONTEXTS:
            try:
                _CONTEXTS[self.engine] = (await self.engine.info()).context_length
            except PluginMissing:
                _CONTEXTS[self.engine] = None
            except EngineError:
                return None
        return _CONTEXTS[self.engine]

    async def fits(self, prompt: Sequence[Mapping[str, Any]], context: int) -> bool:
        """Return whether a context has room for a prompt and a whole answer after it."""
        free = context - (self.max_tokens or _RESERVE)
        if _upper_bound(prompt) <= free:
            return True
        try:
            return await self._count(prompt) <= free
        except EngineError:
            return True  # If there is too little room, the request itself will fail and say so.

    async def _count(self, prompt: Sequence[Mapping[str, Any]]) -> int:
        template_args = self.sampling.get("chat_template_kwargs")
        return len(await self.engine.tokenize_chat(list(prompt), template_args=template_args))


def _upper_bound(prompt: Sequence[Mapping[str, Any]]) -> int:
    """Return how many tokens a prompt can have at most."""
    # No token is shorter than a byte; a chat template adds less than the rest.
    return sum(len(str(message["content"]).encode()) for message in prompt) + 256


async def room_for_answers(
    readers: Iterable[Model],
    empty_prompt: Sequence[Mapping[str, Any]],
    answer_limits: Sequence[int | None],
) -> int | None:
    """Return how many tokens of answers fit into the prompt of every reader; ``None``: all do.

    Takes what :meth:`Model.free_tokens` takes. An engine that cannot be asked is left out: if it
    has too little room, its request will fail and say so.
    """
    rooms: list[int] = []
    for reader in {(one.engine.url, one.model): one for one in readers}.values():
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
        stall_seconds: how long to wait for the next piece once the text has begun; ``None``: for
            ever.

    Raises:
        TimeoutError: no piece came for so long.
        Exception: what the text failed with.
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
def raise_as_mixture_failed(who: str) -> Generator[None]:
    """Turn the failure of the agent that writes the answer into a :class:`MixtureFailed`."""
    try:
        yield
    except (MixtureFailed, UpstreamCancelled):
        raise
    except Exception as error:
        raise MixtureFailed(f"{who} failed: {error}") from error


class CallTimes:
    """The times at which agents' calls began and ended, noted by listening to a workflow."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._finished: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        """Note the time of an event (a ``Listener``)."""
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
