"""Feeding a prompt stream what a growing prompt gains, at the pace its engine asks for."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import anyio

from flashmoa.engine.client import EngineClient
from flashmoa.engine.wire import StreamState
from flashmoa.errors import (
    EngineError,
    EngineTimeout,
    PluginMissing,
    StreamGone,
    StreamUnknown,
)

logger = logging.getLogger(__name__)

# The request usually follows the end at once and carries the rest along; sending it as well
# would only keep the client from sending the request.
_GRACE_SECONDS = 0.01
_OPEN_SECONDS = 10.0
_DELETE_SECONDS = 5.0
# What either has left, and both together, once it is cancelled: whoever leaves waits for it. An
# engine that has not answered by then lets the stream expire.
_LEAVING_SECONDS = 0.3
# In this part of a stream's lifetime its engine is told something.
_SIGN_OF_LIFE = 1 / 3


class Growing(Protocol):
    """A prompt that only grows: :class:`flashmoa.linking.prompt.Prompt`, or token ids likewise."""

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
        ttl_seconds: how long the engine keeps the stream of a client that has vanished; by
            default the client's ``stream_ttl_seconds``.
        namespace: of the stream's KV; by default the client's.

    Run :meth:`run` in a task, and then :meth:`hold` where the stream is not used at once; say
    :meth:`changed` when the prompt has grown.

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
        ttl_seconds: float | None = None,
        namespace: Mapping[str, str] | None = None,
    ) -> None:
        self.stream_id: str | None = None
        self._namespace = namespace
        self._engine = engine
        self._ttl = engine.stream_ttl_seconds if ttl_seconds is None else ttl_seconds
        # When the engine has to be told something, by the event loop's clock.
        self._due = float("inf")
        # Until when whoever leaves waits.
        self._leave_by = float("inf")
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
        self._told(state)
        try:
            await self._follow(state)
        except StreamGone:
            if not self._stopped:
                raise

    async def hold(self) -> None:
        """Keep the open stream until the feed is stopped, though nothing more is appended.

        Raises:
            StreamGone, StreamUnknown: the engine does not have it any more.
        """
        await self._alive_until(self._stopping.wait)

    async def delete(self) -> None:
        """Give the stream's KV back now, even when cancelled; harmless to repeat.

        Raises:
            EngineError: the engine cannot be asked; it will let the stream expire.
        """
        if (stream_id := self.stream_id) is not None:
            await self._see_through(lambda: self._engine.delete_stream(stream_id), _DELETE_SECONDS)

    async def _open(self, first: str | Sequence[int]) -> StreamState:
        """Even when cancelled: a stream the engine has must have its id known here."""
        opened: list[StreamState] = []

        async def ask() -> None:
            is_text = isinstance(first, str)
            state = await self._engine.open_stream(
                text=first if isinstance(first, str) else None,
                input_ids=None if isinstance(first, str) else first,
                add_special_tokens=self._special if is_text else None,
                ttl_seconds=self._ttl,
                namespace=self._namespace,
            )
            # From here on it is given back on every path.
            self.stream_id = state.id
            opened.append(state)

        await self._see_through(ask, _OPEN_SECONDS)
        if not opened:
            raise EngineTimeout(f"{self._engine.url} did not open a stream in time")
        self._is_heard()
        return opened[0]

    async def _see_through(self, work: Callable[[], Awaitable[None]], seconds: float) -> None:
        """Do something for so long at most; once cancelled, for as long as leaving may take."""
        deadline = min(anyio.current_time() + seconds, self._leave_by)
        doing = anyio.CancelScope(deadline=deadline, shield=True)
        problems: list[Exception] = []

        async def do() -> None:
            try:
                with doing:
                    await work()
            except Exception as problem:
                problems.append(problem)
            is_done.set()

        is_done = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(do)
            try:
                await is_done.wait()
            except anyio.get_cancelled_exc_class():
                leave_by = anyio.current_time() + _LEAVING_SECONDS
                self._leave_by = min(self._leave_by, leave_by)
                doing.deadline = min(deadline, self._leave_by)
                raise
        if problems:
            raise problems[0]

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
                self._is_heard()
                self._told(state)
                if end:
                    return
                with anyio.move_on_after(state.pace_seconds):
                    await self._completed()
            else:
                await self._alive_until(self._next_change)

    async def _completed(self) -> None:
        while not self._stopped and not self._prompt.is_complete:
            await self._next_change()

    async def _next_change(self) -> None:
        await self._changed.wait()
        self._changed = anyio.Event()

    def _is_heard(self) -> None:
        """The engine has just been told something."""
        self._due = anyio.current_time() + self._ttl * _SIGN_OF_LIFE

    async def _alive_until(self, happens: Callable[[], Awaitable[object]]) -> None:
        """Wait for something, and tell the engine meanwhile that somebody is there."""
        while True:
            with anyio.CancelScope(deadline=self._due):
                await happens()
                return
            await self._keep_alive()

    async def _keep_alive(self) -> None:
        """An engine that cannot be asked may be there again before the stream expires.

        Raises: StreamGone, StreamUnknown.
        """
        assert self.stream_id is not None
        try:
            with anyio.move_on_after(self._ttl * _SIGN_OF_LIFE):
                await self._engine.keep_alive(self.stream_id)
        except (StreamGone, StreamUnknown):
            if not self._stopped:
                raise
        except PluginMissing:
            self._ttl = float("inf")  # Its plugin does not know this yet.
        except EngineError as error:
            logger.debug("Stream %s is not heard of: %s", self.stream_id, error)
        self._is_heard()
