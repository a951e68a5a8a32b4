"""Read one request's answer within time limits (``CallReader``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from flashmoa.engine import EngineClient, PromptUsage
from flashmoa.engine.generation import check_ending
from flashmoa.engine.wire import Delta
from flashmoa.errors import EngineError, EngineTimeout
from flashmoa.moa.prompts import Message
from flashmoa.moa.settings import Limits

# An answer may have a few more pieces than tokens, since engines hold text back and release it.
_MORE_PIECES = 16


class CallReader:
    """Reads an answer while it is written.

    Args:
        max_tokens: the request's own limit. An engine that does not keep to it is left.
        max_pieces: number of pieces, without the thought, after which the answer ends.

    Attributes:
        pieces: number of pieces so far, thought included.
        thought: what was thought, which the engine has separated.
        logprobs: log-probabilities of the answer's tokens, if requested.
        finish_reason: ``length`` also if the answer ends by a limit of this class.
    """

    def __init__(
        self,
        limits: Limits,
        max_tokens: int | None,
        max_pieces: int | None,
    ) -> None:
        self.pieces = 0
        self.thought = ""
        self.logprobs: list[float] = []
        self.usage: PromptUsage | None = None
        self.finish_reason: str | None = None
        self._limits = limits
        self._most = math.inf if max_tokens is None else max_tokens + _MORE_PIECES
        self._most_visible = math.inf if max_pieces is None else max_pieces
        self._visible = 0

    async def read(
        self,
        engine: EngineClient,
        messages: Sequence[Message],
        body: dict[str, Any],
        write: Callable[[str], None],
    ) -> None:
        """Send a chat request, and call ``write`` with each piece of its answer.

        An answer that has a finish reason is complete, even if its usage does not arrive.

        Raises:
            EngineTimeout: if the answer does not begin in time, or stalls.
            BadAnswer: if its connection ends before the answer does, or the engine aborts it.
            EngineError: if the request fails otherwise.
        """
        limits, now = self._limits, anyio.current_time()
        whole = anyio.CancelScope(deadline=_later(now, limits.answer_seconds))
        with anyio.CancelScope(deadline=_later(now, limits.first_token_seconds)) as patience, whole:
            try:
                async with engine.chat(messages, **body) as deltas:
                    async for delta in deltas:
                        if piece := self._take(delta):
                            write(piece)
                        if self.pieces:
                            now = anyio.current_time()
                            patience.deadline = _later(now, limits.stall_seconds)
                        if self._is_long_enough():
                            break
            except EngineError:
                if self.finish_reason is None:
                    raise
        if patience.cancelled_caught and self.finish_reason is None:
            raise self._timeout()
        if whole.cancelled_caught and self.finish_reason is None:
            if not self.pieces:
                raise EngineTimeout(
                    f"it did not begin: no token came within {limits.answer_seconds:g} s"
                )
            self.finish_reason = "length"
        check_ending(self.finish_reason, engine.url)

    def _take(self, delta: Delta) -> str:
        """Take one step of the generation. Return what it adds to the answer."""
        self.usage = delta.usage or self.usage
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.pieces += bool(delta.text or delta.reasoning)
        self.thought += delta.reasoning
        self._visible += bool(delta.text)
        if not delta.reasoning:
            self.logprobs += delta.logprobs
        return delta.text

    def _is_long_enough(self) -> bool:
        if self.finish_reason is not None:
            return False  # The usage follows.
        if self.pieces < self._most and self._visible < self._most_visible:
            return False
        self.finish_reason = "length"
        return True

    def _timeout(self) -> EngineTimeout:
        if self.pieces:
            return EngineTimeout(f"it stalled: nothing came for {self._limits.stall_seconds:g} s")
        return EngineTimeout(
            f"it did not begin: no token came within {self._limits.first_token_seconds:g} s"
        )


def _later(now: float, seconds: float | None) -> float:
    return math.inf if seconds is None else now + seconds
