"""``HeardCall``: one request whose answer a client hears."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashmoa_sglang.http.hearing.written_text import WrittenText

Tell = Callable[[dict[str, Any]], None]
# The fields with text in a channel's lines.
TEXT_KINDS = ("content", "reasoning", "text")
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


class CallFailed(Exception):
    """Raised to SGLang's streaming code when the request has ended without an answer."""


class HeardCall:
    """Turns what a request has written into lines for a channel.

    SGLang's streaming code reads :meth:`outputs` as the outputs of a request of its own. It makes
    events of them, and :meth:`run` reads the events.

    Args:
        call_id: the client's id of the call.
        written: detokenises the tokens from schedulers; ``None`` if SGLang streams the outputs.
        in_pieces: whether each output that SGLang streams has only the new text.
    """

    def __init__(self, call_id: str, written: WrittenText | None, *, in_pieces: bool) -> None:
        self.id = call_id
        self._written = written
        self._in_pieces = in_pieces
        self._text = ""
        # SGLang's streaming code needs these fields of an answer that is not complete.
        self._meta: dict[str, Any] = {"id": call_id, "finish_reason": None, "prompt_tokens": 0}
        # The output with the whole answer.
        self._last: dict[str, Any] = {}
        self._has_ended = False
        self._changed = asyncio.Event()
        self._told = dict.fromkeys(TEXT_KINDS, 0)

    def note_tokens(self, ids: bytes, prompt_tokens: int) -> None:
        """Note tokens from a scheduler, in the form of ``WrittenTokens``."""
        if self._written is None or self._has_ended:
            return
        self._written.add(ids, prompt_tokens)
        self._text = self._written.text
        self._meta["completion_tokens"] = self._written.tokens
        self._changed.set()

    def note_output(self, output: dict[str, Any]) -> None:
        """Note an output of the request itself."""
        is_piece = self._in_pieces and self._written is None
        self._text = (self._text if is_piece else "") + (output.get("text") or "")
        self._meta = {"finish_reason": None, **output["meta_info"]}
        if self._meta["finish_reason"] is not None:
            self._last = output
        self._changed.set()

    def end(self) -> None:
        """Note that no output follows."""
        self._has_ended = True
        self._changed.set()

    async def outputs(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield outputs as SGLang's ``generate_request`` does. Outputs that wait are joined.

        Raises: CallFailed if the request ends without an answer.
        """
        sent = 0
        while not self._has_ended:
            await self._changed.wait()
            self._changed.clear()
            if len(self._text) > sent or self._last:
                # SGLang writes into the finish reason.
                meta = {**self._meta, "finish_reason": dict(self._meta["finish_reason"] or {})}
                text = self._text[sent:] if self._in_pieces else self._text
                sent = len(self._text)
                yield {**self._last, "text": text, "meta_info": meta}
                if self._last:
                    return
        raise CallFailed

    async def run(self, events: AsyncGenerator[str] | None, tell: Tell) -> None:
        """Tell the call's lines until it has ended.

        Args: events: SGLang's events of :meth:`outputs`; ``None``: the plain text is told.
        """
        end: dict[str, Any] = {"call": self.id, "end": None}
        try:
            async for chunk in self._plain() if events is None else _read(events):
                if usage := chunk.get("usage"):
                    end["usage"] = {name: usage[name] for name in _COUNTS if name in usage}
                for choice in chunk.get("choices") or ():
                    self._tell_delta(choice["delta"], tell)
                    end["end"] = choice.get("finish_reason") or end["end"]
        except CallFailed:
            pass
        tell(end)

    async def _plain(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield chunks of the answer as it is written, in the form of SGLang's chunks of chats."""
        sent = 0
        async with aclosing(self.outputs()) as outputs:
            async for output in outputs:
                text = output["text"] if self._in_pieces else output["text"][sent:]
                sent += len(text)
                meta = output["meta_info"]
                choice = {
                    "delta": {"text": text},
                    "finish_reason": meta["finish_reason"].get("type"),
                }
                yield {"choices": [choice], "usage": meta}

    def _tell_delta(self, delta: dict[str, Any], tell: Tell) -> None:
        texts = {**delta, "reasoning": delta.get("reasoning_content")}
        for kind in TEXT_KINDS:
            if text := texts.get(kind):
                tell({"call": self.id, kind: text, "at": self._told[kind]})
                self._told[kind] += len(text)
        for tool in delta.get("tool_calls") or ():
            if name := (tool.get("function") or {}).get("name"):
                tell({"call": self.id, "tool": name})


async def _read(events: AsyncGenerator[str]) -> AsyncGenerator[dict[str, Any]]:
    """Yield the chunks of a chat's server-sent events."""
    async with aclosing(events):
        async for event in events:
            for line in event.splitlines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))
