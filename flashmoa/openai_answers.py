"""Read the answers of OpenAI's interface as they arrive, and put whole ones together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from typing import Any, cast

from pydantic_core import from_json

from flashmoa.engine import PromptUsage
from flashmoa.engine.generation import (
    EventReader,
    add_tool_calls,
    parse_event,
    read_choices,
    read_content,
)
from flashmoa.linking.calls import CallResult
from flashmoa.linking.prompt import NotForecastable
from flashmoa.linking.response_items import read_items


class UnusableStream(Exception):
    """Raised when an answer does not arrive as chunks that make a completion."""


class AnswerReader:
    """Reads one response, whose bytes it is given as they arrive, and puts the answer together.

    Args:
        is_stream: whether the response is an event stream; else it is a JSON document.
        is_strict: whether all fields of the chunks are to make a :meth:`body`, so that chunks of
            which that is not certain are refused. Otherwise the first choice's texts and calls are
            read, in any form that servers send, for a :meth:`result`.

    Attributes:
        is_over: whether nothing more will come, as the event stream, or an error in it, says.
        error: the last event with an error, if there was one.
        problem: what is wrong with the answer if it is not complete.
    """

    def __init__(self, *, is_stream: bool, is_strict: bool = False) -> None:
        self.is_over = False
        self.error: dict[str, Any] | None = None
        self.problem = "the answer was not read to its end"
        self._is_stream = is_stream
        self._is_strict = is_strict
        self._events = EventReader()
        self._usage: PromptUsage | None = None
        # What the events add up to, as `_merge` puts it together.
        self._fields: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        # The last event without its text. Most events differ in that only, so that the next ones
        # need not be parsed.
        self._last: Mapping[str, Any] | None = None
        self._likely: _LikelyEvent | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there was any part of a message."""
        return any(choice["message"] for choice in self._choices.values())

    def feed(self, data: bytes) -> str:
        """Read the next bytes of an event stream, or a whole JSON document.

        Return what they add to the text of the first choice. Raises: UnusableStream if the reader
        is strict, and they do not fit what came before.
        """
        if not self._is_stream:
            return self._read(data)
        # Servers send events as a whole, most of which differ in their text only.
        likely = self._likely if self._events.is_between_events else None
        if likely is not None and (text := likely.take(data)) is not None:
            return text
        return self._read_all(self._events.feed(data))

    def end(self) -> str:
        """Read the event that the end of the response ends, if there is one. Return its text."""
        return self._read_all(self._events.end())

    def _read_all(self, events: Iterable[bytes]) -> str:
        return "".join([self._read(data) for data in events])

    def _read(self, data: bytes) -> str:
        """Read an event, or a whole answer. Return its text."""
        likely = self._likely
        if likely is not None and (text := likely.take(b"data: %b\n\n" % data)) is not None:
            return text
        if data == b"[DONE]" or self.is_over:
            self.is_over, self._likely = True, None
            return ""
        try:
            event: dict[str, Any] = parse_event(data)
            if event.get("error"):
                self.error = event
                self.problem = f"the server answered with an error: {event['error']}"
                self.is_over = self._is_strict
            text = self._merge_event(event) if self._is_strict else self._take(event)
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            start = data[:200].decode(errors="replace")
            self.problem = f"the server's answer is none of OpenAI's: {start!r}"
            if self._is_strict:
                raise UnusableStream(self.problem) from error
            return ""
        self._expect(data, event)
        return text

    def _take(self, event: Mapping[str, Any]) -> str:
        """Take what a result needs of an event, or of a whole answer. Return its text."""
        if event.get("usage"):
            self._usage = PromptUsage.from_openai(event["usage"])
        added = ""
        for choice in read_choices(event):
            if choice.get("index") or 0:
                continue
            known = self._choice(0)
            delta: Mapping[str, Any] = choice.get("delta" if self._is_stream else "message") or {}
            if pieces := delta.get("tool_calls"):
                if not self._is_stream:
                    pieces = [{**call, "index": place} for place, call in enumerate(pieces)]
                add_tool_calls(known["message"].setdefault("tool_calls", _Places()), pieces)
            for name, value in delta.items():
                text = read_content(value) if name == "content" else value
                if isinstance(text, str) and name in _WHOLE_TEXTS:
                    known["message"].setdefault(name, text)
                elif isinstance(text, str):
                    known["message"].setdefault(name, StringIO()).write(text)
                    added += text if name == "content" else ""
            known["finish_reason"] = choice.get("finish_reason") or known.get("finish_reason")
        return added

    def _merge_event(self, event: Mapping[str, Any]) -> str:
        """Add all fields of an event to those before. Return its text. Raises: UnusableStream."""
        # The first chunk's identity counts: some servers' last chunk, with the usage, has another.
        known = {name for name in _IDENTITY if self._fields.get(name)} | {*_OF_CHUNKS}
        _merge(self._fields, {name: event[name] for name in event if name not in known})
        text = ""
        for piece in read_choices(event):
            found: Any = piece.get("delta") or {}
            index: Any = piece.get("index") or 0
            is_whole = not found and bool(piece.get("message"))
            if is_whole or not isinstance(found, dict) or not isinstance(index, int):
                raise UnusableStream(f"not a choice of a chunk: {piece!r:.200}")
            delta = cast("dict[str, Any]", found)
            choice = self._choice(index)
            _merge(choice, {name: piece[name] for name in piece if name not in _SET_APART})
            _merge(choice["message"], delta, is_delta=True)
            text += read_content(delta.get("content")) if index == 0 else ""
        return text

    def _choice(self, index: int) -> dict[str, Any]:
        return self._choices.setdefault(index, {"index": index, "message": {}})

    def _expect(self, data: bytes, event: dict[str, Any]) -> None:
        """Expect more events like one that has been read, if it is like the one before it."""
        last, self._last = self._last, event
        try:
            (choice,) = event["choices"]
            delta = choice["delta"]
            (name,) = [name for name in delta if delta[name] and name not in _WHOLE_TEXTS]
            index = choice.get("index") or 0
            texts: object = self._choices[index]["message"][name]
        except (LookupError, TypeError, ValueError, AttributeError):
            return
        delta[name] = None
        if not self._is_strict and "logprobs" in choice:
            choice["logprobs"] = None
        # Pieces of tool calls are put together in another way.
        if event == last and isinstance(texts, StringIO):
            around = _find_text(data, name, event, is_strict=self._is_strict)
            is_content = name == "content" and index == 0
            self._likely = _LikelyEvent(*around, texts, is_content) if around else None

    def result(self) -> CallResult | None:
        """Return the answer; ``None`` if it is not complete."""
        self.end()
        choice: dict[str, Any] = _finished(self._choices.get(0, {}))
        # Not `is_over`: a reader may leave an event stream after the last choice.
        if not (reason := choice.get("finish_reason")):
            return None
        message: dict[str, Any] = choice["message"]
        text, calls = message.pop("content", ""), message.pop("tool_calls", None)
        # The message that agents send back.
        reply = {"role": "assistant", "content": text or None, "tool_calls": calls}
        sent = {**message, **reply} if calls else None
        return CallResult(text, self._usage, reason, bool(text) and not calls, sent)

    def body(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed.

        Raises: UnusableStream if there was no choice, or one without an end.
        """
        self.end()
        ends = [choice.get("finish_reason") for choice in self._choices.values()]
        if not (ends and all(ends)):
            raise UnusableStream("the stream ended before the answer was complete")
        choices = [_finished(self._choices[index]) for index in sorted(self._choices)]
        for choice in choices:
            empty: dict[str, Any] = {"role": "assistant", "content": None}
            message = choice["message"] = empty | choice["message"]
            message["role"] = message["role"] or "assistant"
        # No whole answer says that it has no usage or error.
        absent = {name for name in ("usage", "error") if self._fields.get(name) is None}
        fields = {name: self._fields[name] for name in self._fields if name not in absent}
        return {**fields, "object": "chat.completion", "choices": choices}


class ResponseReader(AnswerReader):
    """Reads an answer of the Responses API, which the last event of a stream has as a whole."""

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

    def _expect(self, data: bytes, event: dict[str, Any]) -> None:
        """Expect nothing: events are numbered, so that each is another one."""

    def result(self) -> CallResult | None:
        self.end()
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


@dataclass(frozen=True, slots=True)
class _LikelyEvent:
    """An event like others but for its text, and for log-probabilities if these are skipped.

    Attributes:
        before, between, after: its other bytes; there are some between if these are skipped.
        texts: where the texts of such events are added.
    """

    before: bytes
    between: bytes
    after: bytes
    texts: StringIO
    is_content: bool

    def take(self, data: bytes) -> str | None:
        """Add the text of an event like this one; return the content. ``None``: it is another."""
        if not (data.startswith(self.before) and data.endswith(self.after)):
            return None
        value = data[len(self.before) : len(data) - len(self.after)]
        if self.between:
            value, found, skipped = value.partition(self.between)
            # What is skipped may be the end of this choice, and another one.
            if not found or b'"delta"' in skipped or b'"finish_reason"' in skipped:
                return None
        try:
            text = from_json(value)
            self.texts.write(text)
        except (ValueError, TypeError):
            return None
        return text if self.is_content else ""


_LOGPROBS = re.compile(r'"logprobs"\s*:\s*')


def _find_text(
    data: bytes, name: str, event: Mapping[str, Any], *, is_strict: bool
) -> tuple[bytes, bytes, bytes] | None:
    """Return the bytes of :class:`_LikelyEvent`; ``None`` if reading one may add more than a text.

    Args:
        name: the field of the delta that has the text.
        event: the event with null in place of its text, and of log-probabilities unless strict.
    """
    text = rf'(?<="{re.escape(name)}":)\s*"(?:[^"\\]|\\.)*+"'
    try:
        (before, after), between = re.split(text, data.decode(), maxsplit=1), ""
        if not is_strict and (key := _LOGPROBS.search(after)) is not None:
            _, end = json.JSONDecoder().raw_decode(after, key.end())
            between, after = after[: key.end()], after[end:]
        rest = f"{before}null{between}{between and 'null'}{after}"
        # It is in the only object of the only list; what is found may be in another place.
        is_sure = (rest.count("{"), rest.count("[")) == (3, 1) and from_json(rest) == event
    except (ValueError, RecursionError):
        return None
    pieces = (f"data: {before}", between, f"{after}\n\n")
    before, between, after = map(str.encode, pieces)
    return (before, between, after) if is_sure else None


_IDENTITY = ("id", "created", "model")
# Fields of a chunk that no whole answer has.
_OF_CHUNKS = ("choices", "obfuscation")
# Fields of a chunk's choice that are put together in another way than servers' own ones.
_SET_APART = frozenset(("index", "delta", "message"))
# Texts of a delta that arrive in pieces, lists of it whose items do, and other lists that do.
_TEXTS = frozenset(
    "arguments content input reasoning reasoning_content refusal summary text".split()  # noqa: SIM905
)
_LISTS_OF_PIECES = ("tool_calls", "reasoning_details")
# Texts of a delta that may be repeated. Of others nobody knows whether they are pieces.
_WHOLE_TEXTS = ("role", "id", "type", "name", "format")
_LISTS = ("token_ids",)


def _merge(known: dict[str, Any], new: Mapping[str, Any], *, is_delta: bool = False) -> None:
    """Add the fields of a chunk, of its choice or of its delta to those before.

    What is not known to arrive in pieces arrives once, or is repeated.

    Raises: UnusableStream if a value does not fit those before it.
    """
    for name, value in new.items():
        earlier = known.get(name)
        # Some servers count along; the last usage is that of the whole answer.
        is_open = name == "usage" or earlier in (None, "", [], {})
        if value is None or (earlier is not None and value in ("", [], {})):
            known.setdefault(name, value)
        elif is_delta and name in _TEXTS and isinstance(value, str):
            # Joined at the end: that each piece be added to a longer text takes quadratic time.
            known[name] = earlier = earlier or StringIO()
            earlier.write(value)
        elif is_delta and name in _LISTS_OF_PIECES and isinstance(value, list):
            known[name] = earlier = earlier or _Places()
            _merge_items(earlier, name, cast("list[Any]", value))
        elif is_delta and name in (*_TEXTS, *_LISTS_OF_PIECES):
            raise UnusableStream(f"{name} is of another kind: {value!r:.200}")
        elif name in _LISTS and isinstance(value, list) and isinstance(earlier, list | None):
            known[name] = earlier = cast("list[Any]", [] if earlier is None else earlier)
            earlier += cast("list[Any]", value)
        elif isinstance(value, dict) and (is_open or isinstance(earlier, dict)):
            known[name] = earlier = {} if is_open else cast("dict[str, Any]", earlier)
            _merge(earlier, cast("dict[str, Any]", value), is_delta=is_delta)
        elif is_open:
            known[name] = value
        elif value != earlier or (is_delta and isinstance(value, str) and name not in _WHOLE_TEXTS):
            raise UnusableStream(f"{name} is {earlier!r:.200} and then {value!r:.200}")


class _Places(dict[int, dict[str, Any]]):
    """Items of a list that arrive in pieces, by their places in it."""


def _merge_items(items: _Places, name: str, pieces: list[Any]) -> None:
    for item in pieces:
        piece = cast("dict[str, Any]", item if isinstance(item, dict) else {})
        place: Any = piece.get("index")
        if not isinstance(place, int):
            raise UnusableStream(f"a piece of {name} has no place: {item!r:.200}")
        _merge(items.setdefault(place, {}), piece, is_delta=True)


def _finished(value: Any, name: str = "") -> Any:
    """Return the field that :func:`_merge` has put together as JSON."""
    if isinstance(value, StringIO):
        return value.getvalue()
    if isinstance(value, _Places):
        items = [_finished(value[place]) for place in sorted(value)]
        if name != "tool_calls":
            return items
        # Only the pieces of calls have it, not the calls.
        return [{name: item[name] for name in item if name != "index"} for item in items]
    if isinstance(value, dict):
        return {key: _finished(item, key) for key, item in cast("dict[str, Any]", value).items()}
    return value
