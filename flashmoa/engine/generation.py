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

# A final carriage return does not end a line yet: a line feed may follow. Separators like U+2028,
# at which ``Response.aiter_lines`` breaks lines, may occur in JSON texts.
_LINE_END = re.compile(rb"\r\n|\n|\r(?=.)", re.DOTALL)
_HALF = re.compile("[\ud800-\udfff]")


class EventReader:
    """Reads the data of server-sent events from the bytes of an answer, however these are cut.

    It follows the HTML standard: an empty line ends an event, an event's ``data`` lines are joined,
    and events without data are left out. In one case it is more lenient: the end of the answer also
    ends its last event. White space around the data is removed.
    """

    def __init__(self) -> None:
        self._rest = [b""]  # The pieces of the unfinished line.
        self._data: list[bytes] = []
        self._is_first_line = True
        self.is_between_events = False

    def feed(self, data: bytes) -> list[bytes]:
        """Read the next bytes, and return the data of each event that they end."""
        if self.is_between_events and data.startswith(b"data: ") and data.endswith(b"\n\n"):
            # The usual case: whole events, each with one line of data.
            events = data[len(b"data: ") : -len(b"\n\n")].split(b"\n\ndata: ")
            if b"\r" not in data and data.count(b"\n") == 2 * len(events):
                return [event for each in events if (event := each.strip())]
        events = self._feed_lines(data)
        self.is_between_events = self._rest == [b""] and not self._data
        return events

    def _feed_lines(self, data: bytes) -> list[bytes]:
        # A long line may come in many pieces. Do not search the old ones again.
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
        """Return the data of the last event, if the end of the answer ends one."""
        # A last line without an end may be cut off, so it is left out.
        events = self.feed(b"\n") if self._rest[-1].endswith(b"\r") else []
        return [*events, *self._take_event()]

    def _take_event(self) -> list[bytes]:
        data, self._data = b"\n".join(self._data).strip(), []
        return [data] if data else []


def parse_event(data: bytes) -> Any:
    """Return the JSON value of an event, as ``json.loads`` does. Raises: ValueError."""
    try:
        return from_json(data)  # Three times as fast as `json`.
    except ValueError:  # `json` accepts halves of surrogate pairs; wrong UTF-8 is replaced.
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
    """Yield the objects of an NDJSON answer as they arrive. Empty lines are left out.

    Raises: ValueError if a line is no JSON object.
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
            # Some servers send `"error": null` in every event.
            if found.get("error"):
                raise _make_event_error(found["error"])
            yield found


def _make_event_error(error: Any) -> errors.RequestRefused:
    """Return an event's error. In some engines it is a text, or its code is a word.

    An engine that has begun to answer has read the request: by itself, an error is the engine's.
    """
    fields = cast("dict[str, Any]", error if isinstance(error, dict) else {"message": error})
    code = str(fields.get("code"))
    status = int(code) if code.isascii() and code.isdigit() else 500
    if {"invalid_request_error", "context_length_exceeded"} & {code, str(fields.get("type"))}:
        status = 400
    return errors.RequestRefused(str(fields.get("message", fields)), status, "generation")


async def read_generation(events: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[Delta]:
    """Yield the new text and tokens of each event of ``/generate``; events repeat earlier ones."""
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
        # With n > 1, the other choices belong to other answers.
        first = [one for one in read_choices(event) if not one.get("index")]
        choice: dict[str, Any] = first[0] if first else {}
        delta: dict[str, Any] = choice.get("delta") or {}
        usage: dict[str, Any] | None = event.get("usage")
        logprobs: dict[str, list[dict[str, Any]] | None] = choice.get("logprobs") or {}
        yield Delta(
            text=_without_halves(read_content(delta.get("content"))),
            # The first name is SGLang's, the second newer vLLM's.
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
    """Return the choices of an answer or chunk. Some servers send null instead."""
    found: Any = event.get("choices")
    choices = cast("list[Any]", found) if isinstance(found, list) else []
    return [choice for choice in choices if isinstance(choice, dict)]


def add_tool_calls(calls: dict[int, dict[str, Any]], pieces: Sequence[Mapping[str, Any]]) -> None:
    """Add the pieces of a :class:`Delta` to the tool calls of an answer.

    Args:
        calls: the calls by their index, each as in a message. A piece without an index begins
            another call if it has a new id; otherwise it continues the last call.
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
    """Return the text of a message's content. Some servers send a list of parts."""
    if isinstance(content, list):
        return "".join(map(read_content, cast("list[Any]", content)))
    if isinstance(content, dict):
        return read_content(cast("dict[str, Any]", content).get("text"))
    return content if isinstance(content, str) else ""


def check_ending(finish_reason: str | None, url: str) -> None:
    """Raise BadAnswer if the engine at ``url`` cut off its answer."""
    if finish_reason == "abort":
        raise errors.BadAnswer(f"{url} aborted its answer")
    if finish_reason is None:
        raise errors.BadAnswer(
            f"{url} ended its answer without a finish reason; the answer was cut off"
        )


def _without_halves(text: str) -> str:
    """Replace each half of a surrogate pair by U+FFFD.

    JSON can contain such halves, but no request or answer with them could be sent.
    """
    return text if text.isascii() else _HALF.sub("\ufffd", text)
