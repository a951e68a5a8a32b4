"""Feeding a prompt stream what a growing prompt gains, at the pace its engine asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import anyio

from flashmoa.engine.client import EngineClient
from flashmoa.engine.errors import EngineTimeout, StreamGone
from flashmoa.engine.wire import StreamState

# How long the engine keeps a stream that hears nothing; for clients that vanish.
_STREAM_TTL_SECONDS = 300.0
# The request usually follows the end at once and carries the rest along; sending it as well
# would only keep the client from sending the request.
_GRACE_SECONDS = 0.01
_OPEN_SECONDS = 10.0
_DELETE_SECONDS = 5.0


class Growing(Protocol):
    """A prompt that only grows: :class:`flashmoa.prompts.Prompt`, or token ids likewise."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing more will come."""
        ...

    def take(self) -> str | Sequence[int]:
        """What has come since the last call; empty if nothing has."""
        ...


class PromptFeed:
    """One prompt stream that follows one growing prompt.

    Args:
        engine: where the prompt will be used.
        prompt: text as a chat template renders it, special tokens included, or token ids.
        told: is called with each answer, the first one when the stream is open.
        add_special_tokens: whether the text has none yet.

    Run :meth:`run` in a task; say :meth:`changed` when the prompt has grown.

    Attributes:
        stream_id: once the stream is open; the request that uses it names it. Whoever runs
            the feed gives the stream back with :meth:`delete` unless such a request was sent.
    """

    def __init__(
        self,
        engine: EngineClient,
        prompt: Growing,
        told: Callable[[StreamState], None] = lambda _: None,
        *,
        add_special_tokens: bool = False,
    ) -> None:
        self.stream_id: str | None = None
        self._engine = engine
        self._prompt = prompt
        self._told = told
        self._special = add_special_tokens
        self._changed = anyio.Event()
        self._stopped = False
        self._stopping = anyio.Event()

    def changed(self) -> None:
        """The prompt has grown, or is complete."""
        self._changed.set()

    def stop(self) -> None:
        """Send nothing more: the request is here, or nobody wants the stream any longer."""
        self._stopped = True
        self._stopping.set()
        self._changed.set()

    async def run(self) -> None:
        """Open the stream, and append until the prompt is complete or the feed is stopped.

        Raises:
            EngineError: whatever the engine's routes raise. Not for what a stopped feed had
                under way: an append that its own request overtook finds the stream used.
        """
        first = self._prompt.take()
        if self._stopped or not first:
            return
        state = await self._open(first)
        # From here on the id is known, so that the stream is given back on every path.
        self.stream_id = state.id
        self._told(state)
        try:
            await self._follow(state)
        except StreamGone:
            if not self._stopped:
                raise

    async def delete(self) -> None:
        """Give the stream's KV back now, even when cancelled; harmless to repeat.

        Raises:
            EngineError: the engine cannot be asked; it will let the stream expire.
        """
        if self.stream_id is not None:
            with anyio.move_on_after(_DELETE_SECONDS, shield=True):
                await self._engine.delete_stream(self.stream_id)

    async def _open(self, first: str | Sequence[int]) -> StreamState:
        """Shielded: a stream the engine has must have its id known here."""
        state: StreamState | None = None
        with anyio.move_on_after(_OPEN_SECONDS, shield=True):
            if isinstance(first, str):
                state = await self._engine.open_stream(
                    text=first, add_special_tokens=self._special, ttl_seconds=_STREAM_TTL_SECONDS
                )
            else:
                state = await self._engine.open_stream(
                    input_ids=first, ttl_seconds=_STREAM_TTL_SECONDS
                )
        if state is None:
            raise EngineTimeout(f"{self._engine.url} did not open a stream in time")
        return state

    async def _follow(self, state: StreamState) -> None:
        seq = 0
        while not self._stopped:
            if seq and self._prompt.is_complete:
                with anyio.move_on_after(_GRACE_SECONDS):
                    await self._stopping.wait()
                    return
            piece, end = self._prompt.take(), self._prompt.is_complete
            if piece or end:
                text = piece if isinstance(piece, str) else None
                ids = None if isinstance(piece, str) else piece
                state = await self._engine.append(
                    state.id, seq, text=text or None, input_ids=ids or None, end=end
                )
                seq += 1
                self._told(state)
                if end:
                    return
                with anyio.move_on_after(state.pace_seconds):
                    await self._completed()
            else:
                await self._next_change()

    async def _completed(self) -> None:
        while not self._stopped and not self._prompt.is_complete:
            await self._next_change()

    async def _next_change(self) -> None:
        await self._changed.wait()
        self._changed = anyio.Event()
