"""Read the answer to a chat completion from the bytes of its response (:class:`AnswerReader`), and
report it (:func:`report_end`, :func:`report_whole`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import httpx

from flashmoa.engine import PromptUsage
from flashmoa.engine.generation import (
    EventReader,
    add_tool_calls,
    read_choices,
    read_content,
)
from flashmoa.engine.refusals import make_refusal
from flashmoa.linking.calls import CallObserver, CallResult


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
        self._events = EventReader()
        self._text = ""
        self._finish_reason: str | None = None
        # By place; the pieces of each call are put together here.
        self._tool_calls: dict[int, dict[str, Any]] = {}
        self._other_texts: dict[str, str] = {}
        self._usage: PromptUsage | None = None

    def feed(self, data: bytes) -> str:
        """Read the next bytes of an event stream, or a whole JSON document.

        Return what they add to the text of the first choice.
        """
        known = len(self._text)
        if not self._is_stream:
            self._read_json(data)
        else:
            self._read_events(self._events.feed(data))
        return self._text[known:]

    def result(self) -> CallResult | None:
        """Return the answer; ``None`` if it is not complete."""
        self._read_events(self._events.end())
        # Not `is_over`: a reader may leave an event stream after the last choice.
        if self._finish_reason is None:
            return None
        is_forwarded = bool(self._text) and not self._tool_calls
        message = self._tool_message() if self._tool_calls else None
        return CallResult(self._text, self._usage, self._finish_reason, is_forwarded, message)

    def _tool_message(self) -> Mapping[str, Any]:
        """Return an answer that calls tools as the message that agents send back."""
        calls = [self._tool_calls[place] for place in sorted(self._tool_calls)]
        message = {"role": "assistant", "content": self._text or None, "tool_calls": calls}
        return {**self._other_texts, **message}

    def _read_events(self, events: Iterable[str]) -> None:
        for data in events:
            if data == "[DONE]":
                self.is_over = True
            else:
                self._read_json(data)

    def _read_json(self, data: bytes | str) -> None:
        """Read an event, or a whole answer."""
        try:
            event: Any = json.loads(data)
            if event.get("error"):
                self.problem = f"the server answered with an error: {event['error']}"
            if event.get("usage"):
                self._usage = PromptUsage.from_openai(event["usage"])
            for choice in read_choices(event):
                if choice.get("index", 0) == 0:
                    self._read_choice(choice)
        except (ValueError, AttributeError, TypeError):
            self.problem = f"the server's answer is no chat completion: {data[:200]!r}"

    def _read_choice(self, choice: Mapping[str, Any]) -> None:
        message: Mapping[str, Any] = choice.get("delta" if self._is_stream else "message") or {}
        pieces: list[dict[str, Any]] = message.get("tool_calls") or []
        if not self._is_stream:
            pieces = [{**call, "index": place} for place, call in enumerate(pieces)]
        add_tool_calls(self._tool_calls, pieces)
        for name, text in message.items():
            if name == "content":
                self._text += read_content(text)
            elif name != "role" and isinstance(text, str):
                self._other_texts[name] = self._other_texts.get(name, "") + text
        self._finish_reason = choice.get("finish_reason") or self._finish_reason


def report_end(
    reader: AnswerReader, observer: CallObserver, error: BaseException | None = None
) -> None:
    """Tell an observer of an answer that has been read, as far as it came.

    Args:
        error: why it is not complete, if that is known.
    """
    result = reader.result()
    if result is not None:
        observer.on_finish(result)
    else:
        observer.on_failure(error or RuntimeError(reader.problem))


def report_whole(
    response: Any, content: bytes, observer: CallObserver, *, is_stream: bool = False
) -> None:
    """Tell an observer of an answer, or of a refusal, of which all bytes are there.

    No text is reported on its way: when its first token came is not known.

    Args:
        response: the response, of httpx or httpx2.
        content: its whole body, without content encoding.
        is_stream: see :class:`AnswerReader`.
    """
    if response.is_error:
        observer.on_failure(_make_refusal(response, content))
        return
    reader = AnswerReader(is_stream=is_stream)
    reader.feed(content)
    report_end(reader, observer)


def _make_refusal(response: Any, content: bytes) -> Exception:
    url = str(response.request.url)
    request = httpx.Request("POST", url)
    refusal = httpx.Response(response.status_code, content=content, request=request)
    return make_refusal(refusal, url.partition("/v1/")[0])
