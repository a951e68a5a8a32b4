"""Read the answers of OpenAI's interface as they arrive."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from io import StringIO
from typing import Any

from flashmoa.engine import PromptUsage
from flashmoa.engine.generation import (
    EventReader,
    add_tool_calls,
    parse_event,
    read_choices,
    read_content,
)
from flashmoa.link.calls import CallResult
from flashmoa.link.prompt import NotForecastable
from flashmoa.link.response_items import read_items


class AnswerReader:
    """Reads the texts and calls of a response's first choice, in any form that servers send.

    Args:
        is_stream: whether the response is an event stream; else it is a JSON document.

    Attributes:
        is_over: whether the event stream has said that it ends.
        problem: the error if the answer is not complete.
    """

    def __init__(self, *, is_stream: bool) -> None:
        self.is_over = False
        self.problem = "the answer was not read to its end"
        self._is_stream = is_stream
        self._events = EventReader()
        self._usage: PromptUsage | None = None
        self._finish_reason: str | None = None
        # The message's fields that are texts, and the calls of tools by their places.
        self._texts: dict[str, StringIO] = {}
        self._calls: dict[int, dict[str, Any]] = {}

    def feed(self, data: bytes) -> str:
        """Read the next bytes of an event stream, or a whole JSON document. Return the new text."""
        events = self._events.feed(data) if self._is_stream else (data,)
        return "".join([self._read(event) for event in events])

    def _read_end(self) -> None:
        # The end of the response may end the last event.
        for event in self._events.end():
            self._read(event)

    def _read(self, data: bytes) -> str:
        if data == b"[DONE]" or self.is_over:
            self.is_over = True
            return ""
        try:
            event: dict[str, Any] = parse_event(data)
            if event.get("error"):
                self.problem = f"the server answered with an error: {event['error']}"
            return self._take(event)
        except (ValueError, LookupError, AttributeError, TypeError):
            start = data[:200].decode(errors="replace")
            self.problem = f"the server's answer is none of OpenAI's: {start!r}"
            return ""

    def _take(self, event: Mapping[str, Any]) -> str:
        """Read an event, or a whole answer, of OpenAI's interface. Return its text."""
        if event.get("usage"):
            self._usage = PromptUsage.from_openai(event["usage"])
        added = ""
        for choice in read_choices(event):
            if choice.get("index") or 0:
                continue
            delta: Mapping[str, Any] = choice.get("delta" if self._is_stream else "message") or {}
            if parts := delta.get("tool_calls"):
                if not self._is_stream:
                    parts = [{**call, "index": place} for place, call in enumerate(parts)]
                add_tool_calls(self._calls, parts)
            for name, value in delta.items():
                text = read_content(value) if name == "content" else value
                # Some servers repeat whole texts in each event.
                if isinstance(text, str) and not (name in _WHOLE_TEXTS and name in self._texts):
                    self._texts.setdefault(name, StringIO()).write(text)
                    added += text if name == "content" else ""
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
        return added

    def result(self) -> CallResult | None:
        """Return the answer; ``None`` if it is not complete."""
        self._read_end()
        # Not `is_over`: a reader may leave an event stream after the last choice.
        if self._finish_reason is None:
            return None
        message: dict[str, Any] = {name: text.getvalue() for name, text in self._texts.items()}
        text = message.pop("content", "")
        calls = [self._calls[place] for place in sorted(self._calls)]
        # The message that agents send back.
        reply = {"role": "assistant", "content": text or None, "tool_calls": calls}
        sent = {**message, **reply} if calls else None
        return CallResult(text, self._usage, self._finish_reason, bool(text) and not calls, sent)


class ResponseReader(AnswerReader):
    """Reads an answer of the Responses API. The last event of a stream has the whole answer."""

    _result: CallResult | None = None

    def _take(self, event: Mapping[str, Any]) -> str:
        kind = event.get("type") if self._is_stream else "response.completed"
        if kind == "response.output_text.delta":
            return "" + event["delta"]
        if kind in _LAST_EVENTS:
            self.is_over = self._is_stream
            response: Mapping[str, Any] = event.get("response", event)
            problem = response.get("error") or response.get("message") or response.get("status")
            self.problem = f"the server answered with an error: {problem}"
            self._result = _read_response(response)
        return ""

    def result(self) -> CallResult | None:
        self._read_end()
        return self._result


def _read_response(response: Mapping[str, Any]) -> CallResult | None:
    """Return an answer of the Responses API; ``None`` if it is not complete."""
    if (status := response.get("status")) not in ("completed", "incomplete"):
        return None
    output: list[dict[str, Any]] = response["output"] + []
    texts = [read_content(item.get("content")) for item in output if item.get("type") == "message"]
    calls = any(item.get("type") == "function_call" for item in output)
    messages: list[Any] = []
    with suppress(NotForecastable):  # It has used tools of the server.
        messages = read_items(output)
    usage: Any = response.get("usage")
    return CallResult(
        "".join(texts),
        PromptUsage.from_openai(usage) if usage else None,
        "length" if status == "incomplete" else "tool_calls" if calls else "stop",
        len(texts) == 1 and bool(texts[0]) and not calls,
        # The message that agents send back.
        messages[0] if calls and len(messages) == 1 else None,
    )


_LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed", "error")

# Texts of a message that servers send as a whole.
_WHOLE_TEXTS = ("role", "id", "type", "name", "format")
