"""Have the chat completions of an OpenAI client observed, in its HTTP client.

Below OpenAI's client every request passes: those of ``create``, ``stream`` and ``parse``, of copies
of the client, and of frameworks that were given it. Each attempt of a retried request counts as a
request of its own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any, TypeAlias, cast
from weakref import WeakSet

import httpx

from flashmoa.engine import PromptUsage
from flashmoa.engine.generation import (
    EventReader,
    add_tool_calls,
    is_event_stream,
    read_choices,
    read_content,
)
from flashmoa.engine.refusals import make_refusal
from flashmoa.linking.calls import CallObserver, CallResult
from flashmoa.openai_tap import UntappedClient, http_module, read_chat_body, send_changed

logger = logging.getLogger(__name__)

# Those of httpx or of httpx2, on which OpenAI's client 3 is built. They share no types.
Request: TypeAlias = Any
_Response: TypeAlias = Any
FindObserver = Callable[[Request, Mapping[str, Any]], CallObserver | None]

_observed: WeakSet[Any] = WeakSet()


def observe_completions(http: Any, find_observer: FindObserver) -> None:
    """Have the chat completions of an HTTP client observed. Repeating this is harmless.

    Args:
        http: an ``AsyncClient`` of httpx or httpx2.
        find_observer: returns the observer of a request, given the request and its body; ``None``
            if it is to be sent unchanged.
    """
    if http in _observed:
        return
    _observed.add(http)
    client = UntappedClient(http)

    async def send(request: Request, **options: Any) -> _Response:
        body = read_chat_body(request)
        observer = find_observer(request, body) if body is not None else None
        if body is None or observer is None:
            return await client.send(request, **options)
        try:
            _report_prompt(observer, body)
            return await _send_observed(client, request, body, options, observer)
        except BaseException as error:
            observer.on_failure(error)
            raise

    http.send = send


def _report_prompt(observer: CallObserver, body: Mapping[str, Any]) -> None:
    try:
        observer.on_prompt(body)
    except Exception:
        # The server decides what is wrong with a request.
        logger.exception("A prompt could not be reported; the request is sent all the same")


async def _send_observed(
    client: UntappedClient,
    request: Request,
    body: Mapping[str, Any],
    options: Mapping[str, Any],
    observer: CallObserver,
) -> _Response:
    fields: dict[str, Any] = {}
    if observer.prompt_stream_id is not None:
        fields["prompt_stream_id"] = observer.prompt_stream_id
        if observer.expected_output_tokens is not None:
            fields["expected_output_tokens"] = observer.expected_output_tokens
    # A server may format tool calls in a stream in another way, so such an answer is not tapped.
    on_text = None if body.get("tools") else observer.on_text
    response = await send_changed(client, request, {**fields, **body}, options, on_text)
    if options.get("stream"):
        response.stream = watch(response, observer, http_module(request))
    else:
        is_stream = is_event_stream(response)
        report_whole(response, response.content, observer, is_stream=is_stream)
    return response


def watch(response: Any, observer: CallObserver, http_module: Any) -> Any:
    """Return the byte stream of a response as one that is observed.

    Args:
        http_module: httpx or httpx2, whichever the response is of.
    """
    base: Any = http_module.AsyncByteStream
    stream, answer = response.stream, _PassingAnswer(response, observer)

    class WatchedStream(base):  # httpx accepts no other iterators.
        async def __aiter__(self) -> AsyncIterator[bytes]:
            try:
                async for data in stream:
                    # Observers get the text before the reader may act upon it.
                    answer.feed(data)
                    yield data
            except GeneratorExit:  # The reader has left.
                answer.end()
                raise
            except BaseException as error:
                answer.end(error)
                raise
            answer.complete()

        async def aclose(self) -> None:
            answer.end()
            await stream.aclose()

    return WatchedStream()


class _PassingAnswer:
    """Reads an answer from the bytes of a response as they pass, and reports it once."""

    def __init__(self, response: Any, observer: CallObserver) -> None:
        self._response = response
        self._observer = observer
        self._is_encoded = "content-encoding" in response.headers
        # Given a stream, a response does not try to read a body.
        kind = cast("Any", type(response))
        self._make_twin = partial(kind, 200, headers=response.headers, stream=response.stream)
        self._is_stream = is_event_stream(response)
        self._reader = AnswerReader(is_stream=self._is_stream)
        self._document: list[bytes] = []
        self._is_over = False

    def feed(self, data: bytes) -> None:
        """Read the next bytes, as they came over the network."""
        if self._is_over:
            return
        try:
            plain = self._decode(data)
        except Exception as error:
            # The bytes pass all the same; their reader is told what is wrong with them.
            self.end(error)
            return
        if not self._is_stream:
            self._document.append(plain)
            return
        if text := self._reader.feed(plain):
            self._observer.on_text(text)
        if self._reader.is_over:
            self.end()

    def complete(self) -> None:
        """Report the answer, of which all bytes have passed."""
        if self._is_stream:
            self.end()
        elif not self._is_over:
            self._is_over = True
            report_whole(self._response, b"".join(self._document), self._observer)

    def end(self, error: BaseException | None = None) -> None:
        """Report the answer, of which no more bytes will be read; ``error`` says why not."""
        if not self._is_over:
            self._is_over = True
            report_end(self._reader, self._observer, error)

    def _decode(self, data: bytes) -> bytes:
        """Take the content encoding (``gzip``) off the next bytes."""
        if not self._is_encoded:
            return data
        decoded: Any = self._decoder.decode(data)
        # httpx2 returns it in pieces.
        return decoded if isinstance(decoded, bytes) else b"".join(decoded)

    @cached_property
    def _decoder(self) -> Any:
        # Decoders have a state, and the response's own one is for the response's reader.
        return self._make_twin()._get_content_decoder()


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
