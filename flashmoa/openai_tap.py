"""Get the text of a non-streaming chat completion while it is being generated.

A tap replaces ``send`` on the HTTP client below an OpenAI client. It sends the request as a
streaming one, passes each piece of text on, and returns the response that the non-streaming request
would have had. It sits inside OpenAI's retry loop, so retries, exceptions and timeouts behave as
without it.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias, cast
from weakref import WeakSet

import anyio
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from flashmoa.engine.generation import read_event_data
from flashmoa.openai_requests import as_stream

logger = logging.getLogger(__name__)

OnText = Callable[[str], None]

# OpenAI's client 3 is built on httpx2, earlier ones on httpx. Both have the same interface, but
# share no types.
_Request: TypeAlias = Any
_Response: TypeAlias = Any
_Send = Callable[..., Awaitable[_Response]]

_tapped: WeakSet[Any] = WeakSet()
_current_filter: ContextVar[RetryFilter | None] = ContextVar("flashmoa_retry_filter", default=None)
# Headers that describe the bytes of the stream and are wrong for the response made from it.
_BODY_HEADERS = ("content-type", "content-length", "content-encoding", "transfer-encoding")
# Fields of a chunk's choice that OpenAI's client puts together, and the one that it makes of them.
_JOINED_FIELDS = frozenset(("index", "delta", "logprobs", "finish_reason", "message"))


class RetryFilter:
    """Passes an answer's text on exactly once, although OpenAI's client may retry the request.

    If the text of a later attempt differs from what was passed on, no more text is passed on.
    """

    def __init__(self, on_text: OnText) -> None:
        self._on_text = on_text
        self._passed_on = ""

    def start_attempt(self) -> OnText:
        """Return the function to call with each piece of the next attempt's text."""
        attempt = ""

        def add(piece: str) -> None:
            nonlocal attempt
            attempt += piece
            if len(attempt) > len(self._passed_on) and attempt.startswith(self._passed_on):
                new, self._passed_on = attempt[len(self._passed_on) :], attempt
                self._on_text(new)

        return add


@contextmanager
def text_goes_to(on_text: OnText) -> Generator[None]:
    """Call ``on_text`` with the text of completions that tapped clients request in this context.

    Args:
        on_text: the function to call with each piece of text. It must not raise: OpenAI's client
            would send the request again.
    """
    before = _current_filter.get()
    _current_filter.set(RetryFilter(on_text))
    try:
        yield
    finally:
        # Not _current_filter.reset(token): a coroutine that is garbage-collected is closed in
        # another context, where reset() raises ValueError.
        _current_filter.set(before)


class UnusableStream(Exception):
    """Raised when an answer does not arrive as chunks that make a completion."""


@contextmanager
def _as_unusable() -> Generator[None]:
    try:
        yield
    except Exception as error:
        raise UnusableStream from error


def tap(http: Any) -> None:
    """Tap the chat completions of an HTTP client, which is one of httpx or httpx2.

    Its other requests are sent unchanged. Tapping a client twice is harmless.
    """
    if http in _tapped:
        return
    _tapped.add(http)
    earlier_send: _Send | None = cast("dict[str, Any]", vars(http)).get("send")
    client_class = cast("Any", type(http))

    async def send(request: _Request, **options: Any) -> _Response:
        # Looked up at each call, so that a patch of the class still takes effect.
        send_untapped: _Send = earlier_send or partial(client_class.send, http)
        retry_filter = _current_filter.get()
        if retry_filter is None or options.get("stream"):
            return await send_untapped(request, **options)
        streaming = as_stream(request)
        if streaming is None:
            return await send_untapped(request, **options)
        # httpx or httpx2, whichever this client is made of: its exceptions must be raised.
        errors: Any = sys.modules[type(request).__module__.partition(".")[0]]
        tapped = TappedRequest(request, errors, retry_filter.start_attempt())
        try:
            return await tapped.send(send_untapped, streaming, options)
        except UnusableStream:
            logger.exception("A streamed answer could not be put together; it is asked for again")
            return await send_untapped(request, **options)

    http.send = send


class TappedRequest:
    """One attempt at a request, sent as a streaming one.

    Args:
        request: the request that OpenAI's client made.
        errors: the module whose exceptions its HTTP client raises.
        on_text: the function to call with each piece of the answer's text.
    """

    def __init__(self, request: _Request, errors: Any, on_text: OnText) -> None:
        self._request = request
        self._errors = errors
        self._on_text = on_text
        self._completion = _Completion()
        # When the engine had received the whole request; if the HTTP client does not report that,
        # when this attempt began.
        self._sent_at = anyio.current_time()

    async def send(self, send: _Send, streaming: _Request, options: Mapping[str, Any]) -> _Response:
        """Return the response that the request would have had without a stream.

        Raises: the HTTP client's exceptions; UnusableStream if the chunks make no completion.
        """
        extensions: Mapping[str, Mapping[str, float | None]] = self._request.extensions
        read_timeout = extensions.get("timeout", {}).get("read")
        streaming.extensions = {"trace": self._trace, **streaming.extensions}
        response = await send(streaming, **{**options, "stream": True})
        try:
            content_type = response.headers.get("content-type", "")
            if response.is_error or not content_type.startswith("text/event-stream"):
                await response.aread()
                response.request = self._request
                return response
            # Without a stream, no byte arrives before the answer is complete, so the read timeout
            # limits how long the whole answer takes. Here each chunk would start it again.
            deadline = float("inf") if read_timeout is None else self._sent_at + read_timeout
            with anyio.CancelScope(deadline=deadline):
                return await self._read_stream(response)
            raise self._errors.ReadTimeout("", request=self._request)
        finally:
            await response.aclose()

    async def _trace(self, event: str, _: Mapping[str, Any]) -> None:
        if event.endswith("send_request_body.complete"):
            self._sent_at = anyio.current_time()

    async def _read_stream(self, response: _Response) -> _Response:
        """Read a stream to its end.

        Raises: RemoteProtocolError if the stream breaks off; UnusableStream.
        """
        async with aclosing(read_event_data(response)) as events:
            async for data in events:
                if data == "[DONE]":
                    if not self._completion.has_choices:
                        raise self._protocol_error("the stream ended before its first choice")
                    body = self._completion.body()
                    return await self._whole_response(response, response.status_code, body)
                event = self._parse(data)
                if event.get("error"):
                    return await self._whole_response(response, *_read_error(event))
                if text := self._completion.add(event):
                    self._on_text(text)
        if self._completion.is_finished:  # Some servers end without "[DONE]".
            body = self._completion.body()
            return await self._whole_response(response, response.status_code, body)
        raise self._protocol_error("the answer ended before it was complete")

    def _parse(self, data: str) -> dict[str, Any]:
        try:
            event: Any = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise self._protocol_error(f"not a chunk of a chat completion: {data[:200]!r}")
        return cast("dict[str, Any]", event)

    def _protocol_error(self, message: str) -> Exception:
        return self._errors.RemoteProtocolError(message, request=self._request)

    async def _whole_response(
        self, stream: _Response, status: int, body: Mapping[str, Any]
    ) -> _Response:
        await stream.aclose()  # `elapsed` is known only after this.
        headers = [
            (n, v) for n, v in stream.headers.multi_items() if n.lower() not in _BODY_HEADERS
        ]
        response = type(stream)(
            status,
            headers=[*headers, ("content-type", "application/json")],
            content=json.dumps(body).encode(),
            request=self._request,
            history=stream.history,
        )
        response.elapsed = stream.elapsed
        return response


class _Completion:
    """The chat completion that chunks add up to. Every method raises UnusableStream."""

    def __init__(self) -> None:
        self._state = ChatCompletionStreamState[Any]()
        # The servers' own fields of each choice, by its index.
        self._extras: dict[int, dict[str, Any]] = {}
        self.has_choices = self.is_finished = False

    def add(self, event: dict[str, Any]) -> str:
        """Add a chunk. Return what it adds to the text of the first choice."""
        with _as_unusable():
            chunk = ChatCompletionChunk.construct(**event)
            self._state.handle_chunk(chunk)
            self.has_choices = self.has_choices or bool(chunk.choices)
            for choice in event.get("choices") or ():
                self._add_extras(choice)
                # Answers are tapped that have one choice.
                self.is_finished = self.is_finished or bool(choice.get("finish_reason"))
            return first_text(chunk)

    def _add_extras(self, choice: Mapping[str, Any]) -> None:
        """Keep the fields that OpenAI's client takes from a choice's first chunk alone."""
        extras = self._extras.setdefault(choice.get("index", 0), {})
        for name, value in choice.items():
            if name not in _JOINED_FIELDS:
                extras[name] = _join(extras.get(name), value)

    def body(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        with _as_unusable():
            # The snapshot, since get_final_completion() raises for an answer cut at max_tokens.
            body = self._state.current_completion_snapshot.to_dict(warnings=False)
            for choice in cast("list[dict[str, Any]]", body["choices"]):
                # Some servers repeat the role in each chunk, and the snapshot joins them.
                choice["message"]["role"] = "assistant"
                choice.update(self._extras.get(choice["index"], {}))
            return body


def _join(earlier: Any, later: Any) -> Any:
    """Return the value of a server's own field, given those of two chunks.

    Lists are pieces of one (vLLM's ``token_ids``). Of other values the last one counts, since that
    comes when the answer is complete (SGLang's ``matched_stop``).
    """
    if later is None:
        return earlier
    if isinstance(earlier, list) and isinstance(later, list):
        return [*cast("list[Any]", earlier), *cast("list[Any]", later)]
    return later


def first_text(chunk: ChatCompletionChunk) -> str:
    """Return what a chunk adds to the text of the first choice."""
    return "".join(choice.delta.content or "" for choice in chunk.choices if choice.index == 0)


def _read_error(event: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the status and the body that the error in a stream would have had as a response."""
    error: Any = event["error"]
    fields = cast("dict[str, Any]", error) if isinstance(error, dict) else {}
    try:
        status = int(fields.get("code") or 500)
    except (ValueError, TypeError):
        status = 500
    # SGLang wraps its error object in another object only if it is an event of a stream.
    return (status if 400 <= status < 600 else 500), fields if "object" in fields else event
