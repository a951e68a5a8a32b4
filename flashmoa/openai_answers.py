"""Read the answers of OpenAI's interface as they arrive, and put whole ones together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from io import StringIO
from typing import Any, cast

from flashmoa.engine import PromptUsage
from flashmoa.engine.generation import (
    EventReader,
    add_tool_calls,
    parse_event,
    read_choices,
    read_content,
)
from flashmoa.linking.calls import CallResult


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
        # The pieces of the message's texts, by their fields.
        self._texts: defaultdict[str, list[str]] = defaultdict(list)
        self._finish_reason: str | None = None
        # By place; the pieces of each call are put together here.
        self._tool_calls: dict[int, dict[str, Any]] = {}
        self._usage: PromptUsage | None = None

    def feed(self, data: bytes) -> str:
        """Read the next bytes of an event stream, or a whole JSON document.

        Return what they add to the text of the first choice.
        """
        content = self._texts["content"]
        known = len(content)
        if not self._is_stream:
            self._read_json(data)
        else:
            self._read_events(self._events.feed(data))
        return "".join(content[known:])

    def result(self) -> CallResult | None:
        """Return the answer; ``None`` if it is not complete."""
        self._read_events(self._events.end())
        # Not `is_over`: a reader may leave an event stream after the last choice.
        if self._finish_reason is None:
            return None
        texts = {name: "".join(pieces) for name, pieces in self._texts.items()}
        text = texts.pop("content", "")
        is_forwarded = bool(text) and not self._tool_calls
        message = self._tool_message(text, texts) if self._tool_calls else None
        return CallResult(text, self._usage, self._finish_reason, is_forwarded, message)

    def _tool_message(self, text: str, other_texts: Mapping[str, str]) -> Mapping[str, Any]:
        """Return an answer that calls tools as the message that agents send back."""
        calls = [self._tool_calls[place] for place in sorted(self._tool_calls)]
        message = {"role": "assistant", "content": text or None, "tool_calls": calls}
        return {**other_texts, **message}

    def _read_events(self, events: Iterable[bytes]) -> None:
        for data in events:
            if data == b"[DONE]":
                self.is_over = True
            else:
                self._read_json(data)

    def _read_json(self, data: bytes) -> None:
        """Read an event, or a whole answer."""
        try:
            event = parse_event(data)
            if event.get("error"):
                self.problem = f"the server answered with an error: {event['error']}"
            if event.get("usage"):
                self._usage = PromptUsage.from_openai(event["usage"])
            for choice in read_choices(event):
                if choice.get("index", 0) == 0:
                    self._read_choice(choice)
        except (ValueError, AttributeError, TypeError):
            self.problem = f"the server's answer is no chat completion: {_start(data)!r}"

    def _read_choice(self, choice: Mapping[str, Any]) -> None:
        message: Mapping[str, Any] = choice.get("delta" if self._is_stream else "message") or {}
        pieces: list[dict[str, Any]] = message.get("tool_calls") or []
        if not self._is_stream:
            pieces = [{**call, "index": place} for place, call in enumerate(pieces)]
        add_tool_calls(self._tool_calls, pieces)
        for name, text in message.items():
            if name == "content":
                self._texts[name].append(read_content(text))
            elif name != "role" and isinstance(text, str):
                self._texts[name].append(text)
        self._finish_reason = choice.get("finish_reason") or self._finish_reason


class UnusableStream(Exception):
    """Raised when an answer does not arrive as chunks that make a completion."""


def parse_chunk(data: bytes) -> dict[str, Any]:
    """Return the JSON object in an event, or in a whole answer. Raises: UnusableStream."""
    try:
        event = parse_event(data)
    except ValueError as error:
        raise UnusableStream(f"not JSON: {_start(data)!r}") from error
    if not isinstance(event, dict):
        raise UnusableStream(f"not a chunk of a chat completion: {_start(data)!r}")
    return cast("dict[str, Any]", event)


def _start(data: bytes) -> str:
    return data[:200].decode(errors="replace")


class MergedChunks:
    """The chat completion that the chunks of a stream add up to, field by field."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        # A chunk without its text, and the text that chunks which differ in nothing else add to.
        # Most do, and to compare takes a tenth of the time of merging.
        self._likely: Mapping[str, Any] | None = None
        self._text = StringIO()

    @property
    def has_begun(self) -> bool:
        """Whether a chunk had a choice."""
        return bool(self._choices)

    def add(self, chunk: dict[str, Any]) -> str:
        """Add a chunk, which is the caller's no more.

        Return what it adds to the text of the first choice. Raises: UnusableStream if it does not
        fit the chunks before it.
        """
        try:
            (choice,) = chunk["choices"]
            delta = choice["delta"]
            text = delta["content"]
        except (KeyError, TypeError, ValueError):
            return self._merge(chunk)
        if not isinstance(text, str):
            return self._merge(chunk)
        delta["content"] = None
        if chunk == self._likely:
            self._text.write(text)
            return text
        delta["content"] = text
        added = self._merge(chunk)
        if _may_repeat(chunk, choice, delta):
            delta["content"] = None
            self._likely, self._text = chunk, self._choices[0]["message"]["content"]
        return added

    def _merge(self, chunk: Mapping[str, Any]) -> str:
        # The first chunk's identity counts: some servers' last chunk, with the usage, has another.
        known = {name for name in _IDENTITY if self._fields.get(name)} | {*_OF_CHUNKS}
        _merge(self._fields, {name: chunk[name] for name in chunk if name not in known})
        text = ""
        for piece in read_choices(chunk):
            found: Any = piece.get("delta") or {}
            index: Any = piece.get("index") or 0
            is_whole = not found and bool(piece.get("message"))
            if is_whole or not isinstance(found, dict) or not isinstance(index, int):
                raise UnusableStream(f"not a choice of a chunk: {piece!r:.200}")
            delta = cast("dict[str, Any]", found)
            choice = self._choices.setdefault(index, {"index": index, "message": {}})
            _merge(choice, {name: piece[name] for name in piece if name not in _SET_APART})
            _merge(choice["message"], delta, is_delta=True)
            text += read_content(delta.get("content")) if index == 0 else ""
        return text

    def body(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed.

        Raises: UnusableStream if there was no choice, or one without an end.
        """
        ends = [choice.get("finish_reason") for choice in self._choices.values()]
        if not (ends and all(ends)):
            raise UnusableStream("the stream ended before the answer was complete")
        choices = [_finished(self._choices[index]) for index in sorted(self._choices)]
        for choice in choices:
            empty: dict[str, Any] = {"role": "assistant", "content": None}
            if "matched_stop" in choice:  # SGLang's, whose whole messages have this field, too.
                empty["tool_calls"] = None
            message = choice["message"] = empty | choice["message"]
            message["role"] = message["role"] or "assistant"
        # No whole answer says that it has no usage or error.
        absent = {name for name in ("usage", "error") if self._fields.get(name) is None}
        fields = {name: self._fields[name] for name in self._fields if name not in absent}
        return {**fields, "object": "chat.completion", "choices": choices}


def _may_repeat(
    chunk: Mapping[str, Any], choice: Mapping[str, Any], delta: Mapping[str, Any]
) -> bool:
    """Return whether merging a chunk of the first choice again would add nothing but its text."""
    fields = [chunk[name] for name in chunk if name != "choices"]
    fields += [choice[name] for name in choice if name != "delta"]
    return (
        not choice.get("index")
        and not any(isinstance(field, dict | list) for field in fields)
        and all(delta[name] is None or name in ("content", *_WHOLE_TEXTS) for name in delta)
    )


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
