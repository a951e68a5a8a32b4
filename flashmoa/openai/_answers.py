"""Read the answer to a chat completion from the bytes of its response (:class:`AnswerReader`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from flashmoa.engine import PromptUsage
from flashmoa.linking.observed_call import CallResult


class AnswerReader:
    """Reads one response, whose bytes it is given as they arrive.

    Args:
        is_stream: whether the response is an event stream; else it is a JSON document.

    Attributes:
        is_over: whether the event stream has said that nothing more will come.
        problem: what is wrong with the answer if it is not complete.
    """

    def __init__(self, *, is_stream: bool) -> None:
        self.is_over = False
        self.problem = "the answer was not read to its end"
        self._is_stream = is_stream
        self._unread = b""
        self._text = ""
        self._finish_reason: str | None = None
        self._calls_tools = False
        self._usage: PromptUsage | None = None

    def feed(self, data: bytes) -> str:
        """Read the next bytes of an event stream, or a whole JSON document.

        Return what they add to the text of the first choice.
        """
        known = len(self._text)
        if not self._is_stream:
            self._read_json(data)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._read_event(line.removeprefix(b"data:").strip())
        return self._text[known:]

    def result(self) -> CallResult | None:
        """Return the answer; ``None`` if it is not complete."""
        # Not `is_over`: a reader may leave an event stream after the last choice.
        if self._finish_reason is None:
            return None
        is_forwarded = bool(self._text) and not self._calls_tools
        return CallResult(self._text, self._usage, self._finish_reason, is_forwarded)

    def _read_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.is_over = True
        else:
            self._read_json(data)

    def _read_json(self, data: bytes) -> None:
        """Read an event, or a whole answer."""
        try:
            event: Any = json.loads(data)
            if event.get("error"):
                self.problem = f"the server answered with an error: {event['error']}"
            if event.get("usage"):
                self._usage = PromptUsage.from_openai(event["usage"])
            for choice in event.get("choices") or ():
                if choice.get("index", 0) == 0:
                    self._read_choice(choice)
        except (ValueError, AttributeError, TypeError):
            self.problem = f"the server's answer is no chat completion: {data[:200]!r}"

    def _read_choice(self, choice: Mapping[str, Any]) -> None:
        message: Mapping[str, Any] = choice.get("delta") or choice.get("message") or {}
        self._calls_tools = self._calls_tools or bool(message.get("tool_calls"))
        text = cast("object", message.get("content"))
        self._text += text if isinstance(text, str) else ""
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
