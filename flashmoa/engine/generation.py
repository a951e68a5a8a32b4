"""Read what engines generate: streamed answers as :class:`Delta`."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, cast

import httpx
from pydantic_core import from_json

from flashmoa import errors
from flashmoa.engine.refusals import make_abort_refusal
from flashmoa.engine.wire import Delta, PromptUsage

# Not the end of a line is a carriage return after which a line feed may still come. Separators like
# U+2028, at which ``Response.aiter_lines`` breaks lines, may be in texts in JSON.
_LINE_END = re.compile(rb"\r\n|\n|\r(?=.)", re.DOTALL)
_HALF = re.compile("[\ud800-\udfff]")


class EventReader:
    """Reads the data of server-sent events from the bytes of an answer, however these are cut.

    It follows the HTML standard: an event ends at an empty line, its ``data`` lines are joined, and
    an event without data is none. Where the standard drops an event, it is lenient: the end of the
    answer ends its last event, too. White space around the data is removed.
    """

    def __init__(self) -> None:
        self._rest = [b""]  # The pieces of a line that has not ended.
        self._data: list[bytes] = []
        self._is_first_line = True
        self.is_between_events = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each event that ends in the next bytes."""
        if self.is_between_events and data.startswith(b"data: ") and data.endswith(b"\n\n"):
            # Servers send events as a whole, whose data is one line.
            events = data[len(b"data: ") : -len(b"\n\n")].split(b"\n\ndata: ")
            if b"\r" not in data and data.count(b"\n") == 2 * len(events):
                return [event for each in events if (event := each.strip())]
        events = self._feed_lines(data)
        self.is_between_events = self._rest == [b""] and not self._data
        return events

    def _feed_lines(self, data: bytes) -> list[bytes]:
        # A long line may come in many pieces, so what is known of it is not searched again.
        may_end = b"\n" in data or b"\r" in data or self._rest[-1].endswith(b"\r")
        if data:
            self._rest.append(data)
        if not may_end:
            return []
        *lines, rest = _LINE_END.split(b"".join(self._rest))
        self._rest = [rest]
        events: list[bytes] = []
        for line in lines:
            if self._is_first_line:
                self._is_first_line, line = False, line.removeprefix(codecs.BOM_UTF8)
            if not line:
                events += self._take_event()
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
        return events

    def end(self) -> list[bytes]:
        """Return the data of the event that the end of the answer ends, if there is one."""
        # A last line that has no end may be cut.
        events = self.feed(b"\n") if self._rest[-1].endswith(b"\r") else []
        return [*events, *self._take_event()]

    def _take_event(self) -> list[bytes]:
        data, self._data = b"\n".join(self._data).strip(), []
        return [data] if data else []


def parse_event(data: bytes) -> Any:
    """Return the JSON value of an event, as ``json.loads`` does. Raises: ValueError."""
    try:
        return from_json(data)  # It takes a third of the time.
    except ValueError:  # Halves of surrogate pairs and wrong UTF-8 are no reason to lose an answer.
        try:
            return json.loads(data.decode(errors="replace"))
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


async def read_event_data(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Yield the data of each server-sent event of an answer, as it arrives."""
    reader = EventReader()
    async for piece in response.aiter_bytes():
        for data in reader.feed(piece):
            yield data
    for data in reader.end():
        yield data


async def read_lines(response: httpx.Response) -> AsyncGenerator[dict[str, Any]]:
    """Yield the objects of an answer that has one in each line (NDJSON), as they arrive.

    Empty lines are left out. Raises: ValueError if a line is no JSON object.
    """
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in filter(bytes.strip, lines):
            told = parse_event(line)
            if not isinstance(told, dict):
                raise ValueError(f"not a JSON object: {line[:200]!r}")
            yield cast("dict[str, Any]", told)


async def read_events(response: httpx.Response) -> AsyncGenerator[dict[str, Any]]:
    """Yield the events of a stream.

    Raises:
        BadAnswer: if an event is not a JSON object.
        RequestRefused: if an event is an error.
    """
    async with aclosing(read_event_data(response)) as events:
        async for data in events:
            if data == b"[DONE]":
                continue
            event: Any = None
            with suppress(ValueError):
                event = parse_event(data)
            if not isinstance(event, dict):
                start = data[:200].decode(errors="replace")
                raise errors.BadAnswer(
                    f"the engine sent an event that is not JSON, or not a JSON object: {start!r}. "
                    "Is the URL that of an SGLang engine?"
                )
            found = cast("dict[str, Any]", event)
            # Some servers have the field in every event, and null in it if nothing is wrong.
            if found.get("error"):
                raise _make_event_error(found["error"])
            yield found


def _make_event_error(error: Any) -> errors.RequestRefused:
    """Return the error of an event. Engines differ: it may be a text, and its code a word."""
    fields = cast("dict[str, Any]", error if isinstance(error, dict) else {"message": error})
    code = str(fields.get("code"))
    status = int(code) if code.isascii() and code.isdigit() else 400
    return errors.RequestRefused(str(fields.get("message", fields)), status, "generation")


async def read_generation(events: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[Delta]:
    """Yield the new text and tokens of each event of ``/generate``, which repeats earlier ones."""
    characters, tokens = 0, 0
    async for event in events:
        text: str = event.get("text") or ""
        meta: dict[str, Any] = event["meta_info"]
        reason = meta.get("finish_reason")
        if reason and "prompt_tokens" not in meta:
            raise make_abort_refusal(reason)
        yield Delta(
            text=_without_halves(text[characters:]),
            token_ids=event["output_ids"][tokens:],
            usage=PromptUsage.model_validate(meta) if reason else None,
            finish_reason=reason["type"] if reason else None,
        )
        characters, tokens = len(text), len(event["output_ids"])


async def read_chat(events: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[Delta]:
    """Yield a :class:`Delta` for each chunk of an OpenAI chat completion."""
    async for event in events:
        # With n > 1 there are others, whose text is another one.
        first = [one for one in read_choices(event) if not one.get("index")]
        choice: dict[str, Any] = first[0] if first else {}
        delta: dict[str, Any] = choice.get("delta") or {}
        usage: dict[str, Any] | None = event.get("usage")
        logprobs: dict[str, list[dict[str, Any]] | None] = choice.get("logprobs") or {}
        yield Delta(
            text=_without_halves(read_content(delta.get("content"))),
            # SGLang's name, and that of newer vLLM.
            reasoning=_without_halves(
                delta.get("reasoning_content") or delta.get("reasoning") or ""
            ),
            logprobs=[token["logprob"] for token in logprobs.get("content") or []],
            tool_calls=delta.get("tool_calls") or [],
            usage=PromptUsage.from_openai(usage) if usage else None,
            finish_reason=choice.get("finish_reason"),
        )


def is_event_stream(response: Any) -> bool:
    """Return whether a response of httpx or httpx2 is a stream of events, by its headers."""
    return response.headers.get("content-type", "").lower().startswith("text/event-stream")


def read_choices(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of an answer or of a chunk, in which some servers send null instead."""
    found: Any = event.get("choices")
    choices = cast("list[Any]", found) if isinstance(found, list) else []
    return [choice for choice in choices if isinstance(choice, dict)]


def add_tool_calls(calls: dict[int, dict[str, Any]], pieces: Sequence[Mapping[str, Any]]) -> None:
    """Add the pieces of a :class:`Delta` to the tool calls of an answer.

    Args:
        calls: the calls by their places, each as a message has it. A piece without a place begins
            the next call if it has a new id; else it is of the last call.
    """
    for piece in pieces:
        place: Any = piece.get("index")
        if not isinstance(place, int):
            place = max(calls, default=0)
            if place in calls and piece.get("id") not in (None, "", calls[place]["id"]):
                place += 1
        call = calls.setdefault(place, {"id": "", "type": "function"})
        call["id"] = piece.get("id") or call["id"]
        call["type"] = piece.get("type") or call["type"]
        kind, text = ("custom", "input") if call["type"] == "custom" else ("function", "arguments")
        body: dict[str, str] = call.setdefault(kind, {"name": "", text: ""})
        more: Mapping[str, str | None] = piece.get(kind) or {}
        body["name"] = more.get("name") or body["name"]
        body[text] += more.get(text) or ""


def read_content(content: Any) -> str:
    """Return the text of a content, which some servers send as a list of parts."""
    if isinstance(content, list):
        return "".join(map(read_content, cast("list[Any]", content)))
    if isinstance(content, dict):
        return read_content(cast("dict[str, Any]", content).get("text"))
    return content if isinstance(content, str) else ""


def check_ending(finish_reason: str | None, url: str) -> None:
    """Check that the answer of an engine was not cut off. Raises: BadAnswer if it was."""
    if finish_reason == "abort":
        raise errors.BadAnswer(f"{url} aborted its answer")
    if finish_reason is None:
        raise errors.BadAnswer(
            f"{url} ended its answer without a finish reason; the answer was cut off"
        )


def _without_halves(text: str) -> str:
    """Return a text with U+FFFD in place of each half of a surrogate pair.

    JSON can contain them. They are no text, and no request or answer with them could be sent.
    """
    return text if text.isascii() else _HALF.sub("\ufffd", text)
