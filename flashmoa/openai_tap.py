"""Get the text of a non-streaming chat completion while it is being generated.

A tap replaces ``send`` on the HTTP client below an OpenAI client. It sends the request as a
streaming one, passes each piece of text on, and returns the response that the non-streaming request
would have had. It sits inside OpenAI's retry loop, so retries, exceptions and timeouts behave as
without it. What a server does not take in this form is sent to it as it was.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Generator, Hashable, Mapping
from contextlib import aclosing, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from io import StringIO
from typing import Any, TypeAlias, cast
from weakref import WeakSet

import anyio

from flashmoa.engine.generation import read_choices, read_content, read_event_data
from flashmoa.openai_requests import (
    OWN_FIELDS,
    as_stream,
    http_module,
    read_chat_body,
    with_body,
)

logger = logging.getLogger(__name__)

OnText = Callable[[str], None]

# OpenAI's client 3 is built on httpx2, earlier ones on httpx. Both have the same interface, but
# share no types.
_Request: TypeAlias = Any
_Response: TypeAlias = Any
Send = Callable[..., Awaitable[_Response]]

_tapped: WeakSet[Any] = WeakSet()
_current_filter: ContextVar[RetryFilter | None] = ContextVar("flashmoa_retry_filter", default=None)
# Headers that describe the bytes of the stream and are wrong for the response made from it.
_BODY_HEADERS = ("content-type", "content-length", "content-encoding", "transfer-encoding")
# The statuses with which servers refuse a form of a request that they take in another one: 400 and
# 422 are those of a check of its fields, 405, 406 and 415 those of a gateway that passes no streams
# on, 501 that of a server that has none. Others are about who asks (401, 403), for what (404), how
# much (413) or when (408, 409, 429, 5xx): they would meet the request as it was, too.
_REFUSALS_OF_FORMS = frozenset((400, 405, 406, 415, 422, 501))
# What servers have refused in the form that FlashMoA gave it, oldest first: a server, the model
# and the names of the fields; or the server and the model of streams that are unusable.
_refused: dict[Hashable, None] = {}
_MAX_REFUSED = 1024


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


def tap(http: Any) -> None:
    """Tap the chat completions of an HTTP client, which is one of httpx or httpx2.

    Its other requests are sent unchanged. Tapping a client twice is harmless.
    """
    if http in _tapped:
        return
    _tapped.add(http)
    earlier_send: Send | None = cast("dict[str, Any]", vars(http)).get("send")
    client_class = cast("Any", type(http))

    async def send(request: _Request, **options: Any) -> _Response:
        # Looked up at each call, so that a patch of the class still takes effect.
        send_untapped: Send = earlier_send or partial(client_class.send, http)
        retry_filter = _current_filter.get()
        body = read_chat_body(request)
        if body is None or (retry_filter is None and not OWN_FIELDS & body.keys()):
            return await send_untapped(request, **options)
        if OWN_FIELDS & body.keys():
            # Whoever made the call has added them.
            plain = {name: body[name] for name in body if name not in OWN_FIELDS}
            request = with_body(request, plain)
        on_text = retry_filter.start_attempt() if retry_filter is not None else None
        return await send_changed(send_untapped, request, body, options, on_text)

    http.send = send


async def send_changed(
    send: Send,
    request: _Request,
    body: Mapping[str, Any],
    options: Mapping[str, Any],
    on_text: OnText | None,
) -> _Response:
    """Send a request for a chat completion in another form; if that is refused, as it was.

    What a server refuses is remembered, so that it is not asked twice for the like.

    Args:
        request: the request as it was.
        body: its body, and the fields that FlashMoA adds.
        options: the arguments of ``send``.
        on_text: the function to call with each piece of the answer's text, for which the request is
            sent as a streaming one if that is possible.

    Returns: the response that the request as it was would have had.
    """
    url = request.url
    server = f"{url.scheme}://{url.netloc.decode()}{url.path}", str(body.get("model"))
    is_tapped = on_text is not None and not options.get("stream") and server not in _refused
    streaming = as_stream(body) if is_tapped else None
    changed = streaming or body
    form = server, frozenset(changed)
    if form in _refused or not (streaming or OWN_FIELDS & body.keys()):
        return await send(request, **options)
    try:
        sent = with_body(request, changed)
        if streaming is None or on_text is None:
            response = await send(sent, **options)
        else:
            response = await _TappedRequest(request, on_text).send(send, sent, options)
    except UnusableStream:
        text = "The streams of %s (model %s) make no answers. It is asked for whole ones, unlinked"
        _remember(server, text, *server, exc_info=True)
        return await send(request, **options)
    if response.status_code not in _REFUSALS_OF_FORMS:
        return response
    await response.aclose()
    plain = await send(request, **options)
    if not plain.is_error:
        text = "%s (model %s) refuses requests with %s. Their like are sent unlinked from now on"
        _remember(form, text, *server, ", ".join(sorted(changed)))
    return plain


def _remember(refused: Hashable, text: str, *values: object, exc_info: bool = False) -> None:
    """Remember what a server has refused, and log it the first time."""
    if refused not in _refused:
        logger.warning(text, *values, exc_info=exc_info)
    if len(_refused) >= _MAX_REFUSED:
        _refused.pop(next(iter(_refused)), None)
    _refused[refused] = None


class _TappedRequest:
    """One attempt at a request, sent as a streaming one.

    Args:
        request: the request that OpenAI's client made.
        on_text: the function to call with each piece of the answer's text.
    """

    def __init__(self, request: _Request, on_text: OnText) -> None:
        self._request = request
        self._errors = http_module(request)  # Its HTTP client raises the exceptions of that.
        self._on_text = on_text
        self._completion = MergedChunks()
        # When the engine had received the whole request; if the HTTP client does not report that,
        # when this attempt began.
        self._sent_at = anyio.current_time()

    async def send(self, send: Send, streaming: _Request, options: Mapping[str, Any]) -> _Response:
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
                    body = self._completion.body()
                    return await self._whole_response(response, response.status_code, body)
                event = _parse(data)
                if event.get("error"):
                    return await self._whole_response(response, *_read_error(event))
                if text := self._completion.add(event):
                    self._on_text(text)
        if self._completion.is_finished:  # Some servers end without "[DONE]".
            body = self._completion.body()
            return await self._whole_response(response, response.status_code, body)
        raise self._errors.RemoteProtocolError(
            "the answer ended before it was complete", request=self._request
        )

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
        with suppress(RuntimeError):  # httpx2 does not know it if anything wraps the stream.
            response.elapsed = stream.elapsed
        return response


def _parse(data: str) -> dict[str, Any]:
    try:
        event: Any = json.loads(data)
    except ValueError as error:
        raise UnusableStream(f"not JSON: {data[:200]!r}") from error
    if not isinstance(event, dict):
        raise UnusableStream(f"not a chunk of a chat completion: {data[:200]!r}")
    return cast("dict[str, Any]", event)


class MergedChunks:
    """The chat completion that the chunks of a stream add up to, field by field.

    Attributes:
        is_finished: whether a choice has its finish reason. Tapped answers have one choice.
    """

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self.is_finished = False

    def add(self, chunk: Mapping[str, Any]) -> str:
        """Add a chunk. Return what it adds to the text of the first choice.

        Raises: UnusableStream if it does not fit the chunks before it.
        """
        # The first chunk's identity counts: some servers' last chunk, with the usage, has another.
        known = {name for name in _IDENTITY if self._fields.get(name)} | {"choices"}
        _set(self._fields, {name: chunk[name] for name in chunk if name not in known})
        text = ""
        for piece in read_choices(chunk):
            found: Any = piece.get("delta") or {}
            index: Any = piece.get("index") or 0
            is_whole = not found and bool(piece.get("message"))
            if is_whole or not isinstance(found, dict) or not isinstance(index, int):
                raise UnusableStream(f"not a choice of a chunk: {piece!r:.200}")
            delta = cast("dict[str, Any]", found)
            choice = self._choices.setdefault(index, {"index": index, "message": {}})
            _set(choice, {name: piece[name] for name in piece if name not in _SET_APART})
            _merge(choice["message"], delta)
            self.is_finished = self.is_finished or bool(choice.get("finish_reason"))
            text += read_content(delta.get("content")) if index == 0 else ""
        return text

    def body(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed.

        Raises: UnusableStream if there was no choice.
        """
        if not self._choices:
            raise UnusableStream("no chunk has a choice")
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


_IDENTITY = ("id", "created", "model")
# Fields of a chunk's choice that are put together in another way than servers' own ones.
_SET_APART = frozenset(("index", "delta", "message"))
# Texts in a delta that come as a whole; some servers repeat them in each chunk.
_WHOLE_TEXTS = frozenset(("role", "id", "type", "name"))


def _set(known: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Set fields of a chunk or of its choice.

    Lists are pieces of one (vLLM's ``token_ids``). Of other values the last one counts, since that
    comes when the answer is complete (SGLang's ``matched_stop``).
    """
    for name, value in new.items():
        earlier = known.get(name)
        if isinstance(value, list) and isinstance(earlier, list | None):
            known[name] = earlier = cast("list[Any]", [] if earlier is None else earlier)
            earlier += cast("list[Any]", value)
        elif isinstance(value, dict) and isinstance(earlier, dict | None):
            known[name] = earlier = cast("dict[str, Any]", {} if earlier is None else earlier)
            _set(earlier, cast("dict[str, Any]", value))
        elif earlier is None or value not in (None, ""):
            known[name] = value


def _merge(known: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add a delta to what is known of a message: texts are pieces, lists have places.

    Raises: UnusableStream if a value is of another kind than those before it.
    """
    for name, value in delta.items():
        earlier = known.get(name)
        if value is None or value == [] or (name in _WHOLE_TEXTS and not value):
            known.setdefault(name, value)
        elif name in _WHOLE_TEXTS or isinstance(value, int | float):
            known[name] = value
        elif isinstance(value, str) and (not earlier or isinstance(earlier, StringIO)):
            # Joined at the end: that each piece be added to a longer text takes quadratic time.
            known[name] = earlier = earlier or StringIO()
            earlier.write(value)
        elif isinstance(value, dict) and (not earlier or isinstance(earlier, dict)):
            known[name] = earlier = cast("dict[str, Any]", earlier or {})
            _merge(earlier, cast("dict[str, Any]", value))
        elif isinstance(value, list) and (not earlier or isinstance(earlier, _Places)):
            known[name] = earlier = earlier or _Places()
            for item in cast("list[Any]", value):
                piece = cast("dict[str, Any]", item if isinstance(item, dict) else {})
                place: Any = piece.get("index")
                if not isinstance(place, int):
                    raise UnusableStream(f"a piece of {name} has no place: {item!r:.200}")
                _merge(earlier.setdefault(place, {}), piece)
        else:
            raise UnusableStream(f"{name} is of several kinds: {value!r:.200}")


class _Places(dict[int, dict[str, Any]]):
    """Items of a list that arrive in pieces, by their places in it."""


def _finished(value: Any) -> Any:
    """Return what :func:`_merge` has put together as JSON."""
    if isinstance(value, StringIO):
        return value.getvalue()
    if isinstance(value, _Places):
        items = [_finished(value[place]) for place in sorted(value)]
        return [{name: item[name] for name in item if name != "index"} for item in items]
    if isinstance(value, dict):
        return {name: _finished(item) for name, item in cast("dict[str, Any]", value).items()}
    return value


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
