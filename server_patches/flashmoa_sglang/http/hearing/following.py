"""``Follower``: appends the text of a call to a prompt stream, without the client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from flashmoa_sglang.http.errors import PromptTooLarge, StreamGone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class FollowedCalls(Protocol):
    """The calls that streams may follow, as ``HeardCalls``."""

    def follow(self, follower: Follower) -> None: ...
    def unfollow(self, follower: Follower) -> None: ...


class Follower:
    """Adds a call's text to a prompt stream as the engine writes it.

    Text waits while the stream is busy with an append, and after the stream's request has come. If
    the request is refused, the stream goes on.

    Args:
        stream: the ``PromptStream``, whose module imports this one.
        call_id: the id of the call.
        add: adds text to a stream that is not busy.

    Attributes:
        written: number of the call's characters in the stream.
    """

    def __init__(
        self,
        stream: Any,
        call_id: str,
        add: Callable[[Any, str], Awaitable[None]],
    ) -> None:
        self.call_id = call_id
        self.written = 0
        self._stream = stream
        self._add = add
        self._waiting: list[str] = []
        self._is_stopped = False
        self._task: asyncio.Task[None] | None = None

    def note(self, text: str) -> None:
        """Note the next text of the call."""
        if text and not self._is_stopped:
            self._waiting.append(text)
            self.go_on()

    def go_on(self) -> None:
        """Add the text that waits, unless the stream's request uses the stream."""
        if self._waiting and self._task is None and not self._stream.claimed:
            self._task = asyncio.create_task(self._add_waiting(), name="a stream follows a call")

    def stop(self) -> None:
        self._is_stopped = True
        self._waiting.clear()

    async def _add_waiting(self) -> None:
        try:
            async with self._stream.growing:
                while self._waiting and not self._stream.claimed:
                    text = "".join(self._waiting)
                    self._waiting.clear()
                    await self._add_text(text)
        finally:
            self._task = None

    async def _add_text(self, text: str) -> None:
        try:
            await self._add(self._stream, text)
            self.written += len(text)
        except PromptTooLarge:
            self.stop()  # Later text would leave a gap in the stream.
        except StreamGone:
            # The stream has ended, or its request has come, which may still be refused.
            if not self._is_stopped:
                self._waiting.insert(0, text)
