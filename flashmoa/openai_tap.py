"""Get the text of a non-streaming chat completion while it is being generated.

A tap replaces ``send`` on the HTTP client below an OpenAI client. It sends the request as a
streaming one, passes each piece of text on, and returns the response that the non-streaming request
would have had. It sits inside OpenAI's retry loop, so retries, exceptions and timeouts behave as
without it. What a server does not take in this form is sent to it as it was.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Hashable, Mapping
from contextlib import aclosing, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from io import StringIO
from typing import Any, TypeAlias, cast
from weakref import WeakSet

import anyio

from flashmoa.engine.generation import (
    is_event_stream,
    read_choices,
    read_content,
    read_event_data,
)

logger = logging.getLogger(__name__)

OnText = Callable[[str], None]

# OpenAI's client 3 is built on httpx2, earlier ones on httpx. Both have the same interface, but
# share no types.
_Request: TypeAlias = Any
_Response: TypeAlias = Any
Send = Callable[..., Awaitable[_Response]]

# The fields that FlashMoA adds to requests, for engines with its plugin.
OWN_FIELDS = frozenset(("prompt_stream_id", "expected_output_tokens"))
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
# and the names of the fields; or the server and the model of streams that are unusable. With each
# is until when, by ``time.monotonic()``, it is not tried again.
_refused: dict[Hashable, float] = {}
_MAX_REFUSED = 1024
# A server may have refused it only once, for another reason than the form.
_REFUSED_SECONDS = 300.0
# What a request as it was has at least of its read timeout, however long its other form took:
# making a connection is no part of that timeout, and with none left it would fail for certain.
_LEAST_SECONDS = 1.0


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


class RefusedForm(Exception):
    """Raised when a server refuses the form that FlashMoA gave to a request."""


class UntappedClient:
    """An HTTP client as it is before its ``send`` is replaced.

    Args:
        http: an ``AsyncClient`` of httpx or httpx2.
    """

    def __init__(self, http: Any) -> None:
        self._http = http
        self._earlier: Send | None = cast("dict[str, Any]", vars(http)).get("send")

    @property
    def has_response_hooks(self) -> bool:
        """Whether functions of its user read the responses, which expect them as they were."""
        return bool(self._http.event_hooks["response"])

    async def send(self, request: _Request, **options: Any) -> _Response:
        # Looked up at each call, so that a patch of the class still takes effect.
        send = self._earlier or partial(cast("Any", type(self._http)).send, self._http)
        return await send(request, **options)


def tap(http: Any) -> None:
    """Tap the chat completions of an HTTP client, which is one of httpx or httpx2.

    Its other requests are sent unchanged. Tapping a client twice is harmless.
    """
    if http in _tapped:
        return
    _tapped.add(http)
    client = UntappedClient(http)

    async def send(request: _Request, **options: Any) -> _Response:
        retry_filter = _current_filter.get()
        body = read_chat_body(request)
        if body is None or (retry_filter is None and not OWN_FIELDS & body.keys()):
            return await client.send(request, **options)
        if OWN_FIELDS & body.keys():
            # Whoever made the call has added them.
            plain = {name: body[name] for name in body if name not in OWN_FIELDS}
            request = with_body(request, plain)
        on_text = retry_filter.start_attempt() if retry_filter is not None else None
        return await send_changed(client, request, body, options, on_text)

    http.send = send


async def send_changed(
    client: UntappedClient,
    request: _Request,
    body: Mapping[str, Any],
    options: Mapping[str, Any],
    on_text: OnText | None,
) -> _Response:
    """Send a request for a chat completion in another form; if that is refused, as it was.

    What a server refuses is remembered for a while, so that it is not asked twice for the like.

    Args:
        request: the request as it was.
        body: its body, and the fields that FlashMoA adds.
        options: the arguments of ``send``.
        on_text: the function to call with each piece of the answer's text, for which the request is
            sent as a streaming one if that is possible.

    Returns: the response that the request as it was would have had.
    """
    url, is_streamed = request.url, bool(options.get("stream"))
    server = f"{url.scheme}://{url.netloc.decode()}{url.path}", str(body.get("model"))
    is_tapped = not (is_streamed or client.has_response_hooks or _is_refused(server))
    streaming = as_stream(body) if is_tapped and on_text is not None else None
    changed = streaming or body
    form = server, frozenset(changed)
    is_same = not (streaming or OWN_FIELDS & body.keys())
    # With an idempotency key, a server may take one request only.
    if is_same or _is_refused(form) or "idempotency-key" in request.headers:
        return await client.send(request, **options)
    began = anyio.current_time()
    try:
        sent = with_body(request, changed)
        if streaming is not None and on_text is not None:
            return await _TappedRequest(request, on_text).send(client, sent, options)
        response = await client.send(sent, **options)
        if response.status_code not in _REFUSALS_OF_FORMS:
            return response
        await response.aclose()
        problem: Exception = RefusedForm()
    except (UnusableStream, RefusedForm) as error:
        problem = error
    if not is_streamed:
        _take_time(request, anyio.current_time() - began)
    try:
        plain = await client.send(request, **options)
    except http_module(request).ReadTimeout:
        # The stream took that time. A retry would lack it, too, if it began with a stream.
        if isinstance(problem, UnusableStream):
            _remember(problem, form)
        raise
    if plain.is_success:
        _remember(problem, form)
    return plain


def _take_time(request: _Request, seconds: float) -> None:
    """Take the time that another form of a request took from its read timeout."""
    timeout: Mapping[str, float | None] = request.extensions.get("timeout", {})
    if (read := timeout.get("read")) is not None:
        left = {**timeout, "read": max(read - seconds, min(read, _LEAST_SECONDS))}
        request.extensions = {**request.extensions, "timeout": left}


def _is_refused(what: Hashable) -> bool:
    return time.monotonic() < _refused.get(what, 0.0)


def _remember(problem: Exception, form: tuple[tuple[str, str], frozenset[str]]) -> None:
    """Remember for some minutes what a server has refused, and log it the first time."""
    server, fields = form
    refused: Hashable = server if isinstance(problem, UnusableStream) else form
    is_new = _refused.pop(refused, None) is None
    if is_new and refused == server:
        text = "The streams of %s (model %s) make no answers. It is asked for whole ones, unlinked"
        logger.warning(text, *server, exc_info=problem)
    elif is_new:
        text = "%s (model %s) refuses requests with %s. Their like are sent unlinked for a while"
        logger.warning(text, *server, ", ".join(sorted(fields)))
    if len(_refused) >= _MAX_REFUSED:
        _refused.pop(next(iter(_refused)), None)
    _refused[refused] = time.monotonic() + _REFUSED_SECONDS


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

    async def send(
        self, client: UntappedClient, streaming: _Request, options: Mapping[str, Any]
    ) -> _Response:
        """Return the response that the request would have had without a stream.

        Raises: the HTTP client's exceptions; UnusableStream if the chunks make no completion;
            RefusedForm.
        """
        extensions: Mapping[str, Mapping[str, float | None]] = self._request.extensions
        read_timeout = extensions.get("timeout", {}).get("read")
        streaming.extensions = {"trace": self._trace, **streaming.extensions}
        response = await client.send(streaming, **{**options, "stream": True})
        try:
            # Without a stream, no byte arrives before the answer is complete, so the read timeout
            # limits how long the whole answer takes. Here each chunk would start it again.
            deadline = float("inf") if read_timeout is None else self._sent_at + read_timeout
            with anyio.CancelScope(deadline=deadline):
                return await self._read(response)
            raise self._errors.ReadTimeout("", request=self._request)
        finally:
            await response.aclose()

    async def _trace(self, event: str, _: Mapping[str, Any]) -> None:
        if event.endswith("send_request_body.complete"):
            self._sent_at = anyio.current_time()

    async def _read(self, response: _Response) -> _Response:
        """Read a response to its end. Raises: UnusableStream; RefusedForm."""
        if response.status_code in _REFUSALS_OF_FORMS:
            raise RefusedForm
        if response.is_success and is_event_stream(response):
            return await self._read_stream(response)
        kind = response.headers.get("content-type", "")
        if response.is_success and "json" not in kind.lower():
            raise UnusableStream(f"neither a stream nor JSON: {kind!r}")
        await response.aread()
        if response.is_success:  # Some servers answer with a whole completion.
            choices = read_choices(_parse(response.text))
            if not any(choice.get("message") for choice in choices):
                raise UnusableStream(f"not a whole answer: {response.text[:200]!r}")
        response.request = self._request
        return response

    async def _read_stream(self, response: _Response) -> _Response:
        """Read a stream to its end.

        Raises: UnusableStream; RefusedForm if it has an error in place of an answer.
        """
        async with aclosing(read_event_data(response)) as events:
            async for data in events:
                if data == "[DONE]":  # Some servers end without it.
                    break
                event = _parse(data)
                if event.get("error"):
                    status, body = _read_error(event)
                    # 500 says no more than that there is an error, whose true status is that of the
                    # request as it was.
                    may_be_form = status in (None, 500) or status in _REFUSALS_OF_FORMS
                    if may_be_form and not self._completion.has_begun:
                        raise RefusedForm
                    return await self._whole_response(response, status or 500, body)
                if text := self._completion.add(event):
                    self._on_text(text)
        body = self._completion.body()
        return await self._whole_response(response, response.status_code, body)

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
    """The chat completion that the chunks of a stream add up to, field by field."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    @property
    def has_begun(self) -> bool:
        """Whether a chunk had a choice."""
        return bool(self._choices)

    def add(self, chunk: Mapping[str, Any]) -> str:
        """Add a chunk. Return what it adds to the text of the first choice.

        Raises: UnusableStream if it does not fit the chunks before it.
        """
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


def _read_error(event: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """Return the status, if it is known, and the body of an error in a stream as a response."""
    error: Any = event["error"]
    fields = cast("dict[str, Any]", error) if isinstance(error, dict) else {}
    code = str(fields.get("code"))
    is_status = len(code) == 3 and code.isascii() and code.isdigit() and code[0] in "45"
    # SGLang wraps its error object in another object only if it is an event of a stream.
    return (int(code) if is_status else None), fields if "object" in fields else event


def http_module(request: _Request) -> Any:
    """Return httpx or httpx2, whichever a request is of."""
    return sys.modules[type(request).__module__.partition(".")[0]]


def read_chat_body(request: _Request) -> dict[str, Any] | None:
    """Return the body of a request for a chat completion; ``None`` for other requests."""
    if request.method != "POST" or not request.url.path.endswith("/chat/completions"):
        return None
    try:
        body: object = json.loads(request.content)
    except (ValueError, RuntimeError):  # RequestNotRead: its body is not there before it is sent.
        return None
    return cast("dict[str, Any]", body) if isinstance(body, dict) else None


def with_body(request: _Request, body: Mapping[str, Any]) -> _Request:
    """Return a request with another JSON body, in the format of OpenAI's client."""
    headers = request.headers.copy()
    headers.pop("content-length", None)
    try:
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # Half of a surrogate pair, which JSON can have only as an escape.
        content = json.dumps(body, separators=(",", ":")).encode()
    return type(request)(
        request.method,
        request.url,
        headers=headers,
        content=content,
        extensions=request.extensions,
    )


def as_stream(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the body of a request for a chat completion as that of one for a stream.

    ``None`` for one that asks for a stream, and for what streams do not carry: several answers,
    whose texts nobody gets as they arrive; log-probabilities, of which SGLang's streams lack those
    of tokens without text; sound; and what servers return on request besides the text. Also for
    one whose ``stream_options`` are none: the server says what is wrong with them.
    """
    options: Any = body.get("stream_options") or {}
    has_text_only = (body.get("modalities") or ["text"]) == ["text"] and not body.get("audio")
    is_one = not body.get("stream") and (body.get("n") or 1) == 1 and has_text_only
    if not is_one or not isinstance(options, dict) or any(map(_is_only_whole, body.items())):
        return None
    return {**body, "stream": True, "stream_options": {**options, "include_usage": True}}


def _is_only_whole(field: tuple[str, Any]) -> bool:
    name, value = field
    is_asked = value is not None and value is not False
    return is_asked and (name.startswith("return_") or name.endswith("logprobs"))
