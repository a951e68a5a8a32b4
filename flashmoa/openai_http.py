"""Observe the answers that an OpenAI client asks for, in the HTTP client below it.

Every request passes there, below OpenAI's retry loop: those of ``create``, ``stream`` and
``parse``, of copies of the client, and of frameworks that were given it. Retries, exceptions and
timeouts stay as they are. If an observer takes the text of a whole answer while it is written, the
request is sent as a streaming one, and its response is put together as it would have been. A
request is sent as it was if a stream may have another text (:func:`why_left_whole`), if its server
does not take it in that form, and if it is of the Responses API: streams lack fields of a response.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import aclosing, contextmanager, suppress
from functools import cached_property, partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import httpx

from flashmoa.engine.connections import keep_by_loop
from flashmoa.engine.generation import is_event_stream
from flashmoa.engine.refusals import make_refusal
from flashmoa.linking.calls import CallObserver
from flashmoa.linking.response_items import as_chat
from flashmoa.openai_answers import AnswerReader, ResponseReader, UnusableStream
from flashmoa.openai_io import (
    BlockingIO,
    Request,
    Response,
    UntappedIO,
    finish,
    http_module,
    is_blocking,
)
from flashmoa.openai_requests import as_stream, change_body, is_response, read_body
from flashmoa.openai_whole import why_left_whole

logger = logging.getLogger(__name__)

OnText = Callable[[str], None]
FindObserver = Callable[[Request, Mapping[str, Any]], CallObserver | None]

# By HTTP client, the functions that :func:`observe_completions` was given for it.
_finders: WeakKeyDictionary[Any, dict[Callable[[], FindObserver | None], None]] = (
    WeakKeyDictionary()
)
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


class RefusedForm(Exception):
    """Raised when a server refuses the form that FlashMoA gave to a request."""


def observe_completions(http: Any, current: Callable[[], FindObserver | None]) -> None:
    """Have the chat completions of an HTTP client observed. Repeating this is harmless.

    Each attempt of a retried request is a request of its own.

    Args:
        http: an ``AsyncClient`` or a ``Client`` of httpx or httpx2.
        current: returns the function that finds the observers of requests which are made in this
            context, given a request and its body; ``None`` if none of them is observed. Of several
            functions that were given for a client, the first one with an observer counts.
    """
    if http in _finders:
        _finders[http].setdefault(current)
        return
    finders = _finders[http] = {current: None}
    client = BlockingIO(http) if is_blocking(http) else UntappedIO(http)
    # OpenAI's own HTTP client keeps connections of one event loop, which in the next one, as of the
    # next `asyncio.run`, make a request fail and be repeated, and cannot be closed.
    if type(http).__name__ == "AsyncHttpxClientWrapper" and isinstance(http, httpx.AsyncClient):
        keep_by_loop(http)

    async def send(request: Request, **options: Any) -> Response:
        found = [find for each in tuple(finders) if (find := each()) is not None]
        # Without them, prompts of megabytes need not be parsed.
        body = read_body(request) if found else None
        if body is None:
            return await client.send(request, **options)
        observer = next(filter(None, (find(request, body) for find in found)), None)
        if observer is None:
            return await client.send(request, **options)
        try:
            return await _send_observed(client, request, body, options, observer)
        except BaseException as error:
            observer.on_failure(error)
            raise

    def send_blocking(request: Request, **options: Any) -> Response:
        return finish(send(request, **options))

    http.send = send_blocking if is_blocking(http) else send


def stop_observing(http: Any, current: Callable[[], FindObserver | None]) -> None:
    """Undo :func:`observe_completions` with these arguments, however often it was called."""
    _finders.get(http, {}).pop(current, None)


async def _send_observed(
    client: UntappedIO,
    request: Request,
    body: Mapping[str, Any],
    options: Mapping[str, Any],
    observer: CallObserver,
) -> Response:
    kind = ResponseReader if is_response(request) else AnswerReader
    try:
        observer.on_prompt(body if kind is AnswerReader else as_chat(body))
    except Exception:
        # The server decides what is wrong with a request.
        logger.exception("A prompt could not be reported; the request is sent all the same")
    fields: dict[str, Any] = {}
    if observer.prompt_stream_id is not None:
        fields["prompt_stream_id"] = observer.prompt_stream_id
    if observer.expected_output_tokens is not None:
        fields["expected_output_tokens"] = observer.expected_output_tokens
    for name, value in observer.headers.items():
        request.headers.setdefault(name, value)
    on_text = _contained(observer.on_text)
    streaming: Mapping[str, Any] | None = None
    if observer.takes_text and kind is AnswerReader and not options.get("stream"):
        streaming = await _stream_form(client, request, body, observer)
    changed = {**fields, **(streaming or body)}
    on_piece = None if streaming is None else on_text
    response = await send_changed(client, request, body, changed, options, on_piece)
    # A hook of the HTTP client may have read a stream already.
    if options.get("stream") and not response.is_closed:
        response.stream = client.watch(response, PassingAnswer(response, observer, on_text, kind))
        observer.on_response(partial(client.close, response))
    else:
        reader = kind(is_stream=is_event_stream(response))
        report_whole(response, response.content, observer, reader)
    return response


async def _stream_form(
    client: UntappedIO, request: Request, body: Mapping[str, Any], observer: CallObserver
) -> Mapping[str, Any] | None:
    """Return the body of a request for a whole answer as one for a stream, if that will do."""
    if client.has_response_hooks or _is_refused(_server_of(request, body)):
        return None
    streaming = as_stream(body)
    if streaming is not None and (reason := await why_left_whole(client, request, body)):
        observer.on_held(reason)
        return None
    return streaming


def _server_of(request: Request, body: Mapping[str, Any]) -> tuple[str, str]:
    """Return a request's server and model. Refusals are remembered for both together."""
    url = request.url
    return f"{url.scheme}://{url.netloc.decode()}{url.path}", str(body.get("model"))


def _contained(on_text: OnText) -> OnText:
    """Return a function that passes text on until that fails, which OpenAI's client would retry."""
    is_failed = False

    def pass_on(text: str) -> None:
        nonlocal is_failed
        if not is_failed:
            try:
                on_text(text)
            except Exception:
                is_failed = True
                logger.exception("An observer of a call failed; it gets no more of the call's text")

    return pass_on


async def send_changed(
    client: UntappedIO,
    request: Request,
    body: Mapping[str, Any],
    changed: Mapping[str, Any],
    options: Mapping[str, Any],
    on_text: OnText | None,
) -> Response:
    """Send a request for a chat completion in another form; if that is refused, as it was.

    What a server refuses is remembered for a while, so that it is not asked twice for the like.

    Args:
        request: the request as it was.
        body: its body.
        changed: the body to send, which has all its fields.
        options: the arguments of ``send``.
        on_text: the function to call with each piece of the answer's text, if ``changed`` asks for
            a stream in place of a whole answer.

    Returns: the response that the request as it was would have had.
    """
    is_streamed = bool(options.get("stream"))
    form = _server_of(request, body), frozenset(changed)
    # With an idempotency key, a server may take one request only.
    if changed == body or _is_refused(form) or "idempotency-key" in request.headers:
        return await client.send(request, **options)
    began = time.monotonic()
    try:
        sent = with_body(request, body, changed)
        if on_text is not None:
            return await _TappedRequest(client, request, on_text).send(sent, options)
        response = await client.send(sent, **options)
        if response.status_code not in _REFUSALS_OF_FORMS:
            return response
        await client.close(response)
        problem: Exception = RefusedForm()
    except (UnusableStream, RefusedForm) as error:
        problem = error
    if not is_streamed:
        _take_time(request, time.monotonic() - began)
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


def _take_time(request: Request, seconds: float) -> None:
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
        client: the HTTP client to send it with.
        request: the request that OpenAI's client made.
        on_text: the function to call with each piece of the answer's text.
    """

    def __init__(self, client: UntappedIO, request: Request, on_text: OnText) -> None:
        self._client = client
        self._request = request
        self._errors = http_module(request)  # Its HTTP client raises the exceptions of that.
        self._on_text = on_text
        self._reader = AnswerReader(is_stream=True, is_strict=True)
        # When the engine had received the whole request; if the HTTP client does not report that,
        # when this attempt began.
        self._sent_at = time.monotonic()
        extensions: Mapping[str, Mapping[str, float | None]] = request.extensions
        self._timeouts = dict(extensions.get("timeout", {}))
        self._read_timeout = self._timeouts.get("read")

    async def send(self, streaming: Request, options: Mapping[str, Any]) -> Response:
        """Return the response that the request would have had without a stream.

        Raises: the HTTP client's exceptions; UnusableStream if the chunks make no completion;
            RefusedForm.
        """
        streaming.extensions = {
            "trace": self._client.trace(self._hear),
            **streaming.extensions,
            "timeout": self._timeouts,
        }
        response = await self._client.send(streaming, **{**options, "stream": True})
        try:
            # Without a stream, no byte arrives before the answer is complete, so the read timeout
            # limits how long the whole answer takes. Here each chunk would start it again.
            with self._client.time_limit(response, self._time_left()):
                return await self._read(response)
            raise self._errors.ReadTimeout("", request=self._request)
        finally:
            await self._client.close(response)

    def _time_left(self) -> float | None:
        if self._read_timeout is None:
            return None
        return self._read_timeout - (time.monotonic() - self._sent_at)

    def _limit_next_read(self) -> None:
        """Leave a read of HTTP/2, for which the timeout is looked up, what is left of the time."""
        left = self._time_left()
        if left is not None and left <= 0:
            raise self._errors.ReadTimeout("", request=self._request)
        self._timeouts["read"] = left

    def _hear(self, event: str) -> None:
        if event.endswith("send_request_body.complete"):
            self._sent_at = time.monotonic()

    async def _read(self, response: Response) -> Response:
        """Read a response to its end. Raises: UnusableStream; RefusedForm."""
        if response.status_code in _REFUSALS_OF_FORMS:
            raise RefusedForm
        if response.is_success and is_event_stream(response):
            return await self._read_stream(response)
        kind = response.headers.get("content-type", "")
        if response.is_success and "json" not in kind.lower():
            raise UnusableStream(f"neither a stream nor JSON: {kind!r}")
        await self._client.read(response)
        if response.is_success:  # Some servers answer with a whole completion.
            whole = AnswerReader(is_stream=False)
            whole.feed(response.content)
            if not whole.has_begun:
                raise UnusableStream(f"not a whole answer: {response.text[:200]!r}")
        response.request = self._request
        return response

    async def _read_stream(self, response: Response) -> Response:
        """Read a stream to its end.

        Raises: UnusableStream; RefusedForm if it has an error in place of an answer.
        """
        reader = self._reader
        async with aclosing(self._client.pieces(response)) as pieces:
            self._limit_next_read()
            async for piece in pieces:
                self._limit_next_read()
                if text := reader.feed(piece):
                    self._on_text(text)
                if reader.is_over:  # Some servers end without saying so.
                    break
            if reader.error is None:
                # Only after the end of its response, soon to come, is a connection used again.
                limit = self._client.time_limit(response, 0.1)
                with suppress(self._errors.HTTPError), limit as is_limited:
                    while is_limited is not None and await anext(pieces, None) is not None:
                        pass
        if text := reader.end():
            self._on_text(text)
        if reader.error is not None:
            status, body = _read_error(reader.error)
            # 500 says no more than that there is an error, whose true status is that of the
            # request as it was.
            may_be_form = status in (None, 500) or status in _REFUSALS_OF_FORMS
            if may_be_form and not reader.has_begun:
                raise RefusedForm
            return await self._whole_response(response, status or 500, body)
        body = reader.body()
        return await self._whole_response(response, response.status_code, body)

    async def _whole_response(
        self, stream: Response, status: int, body: Mapping[str, Any]
    ) -> Response:
        await self._client.close(stream)  # `elapsed` is known only after this.
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


def _read_error(event: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """Return the status, if it is known, and the body of an error in a stream as a response."""
    error: Any = event["error"]
    fields = cast("dict[str, Any]", error) if isinstance(error, dict) else {}
    code = str(fields.get("code"))
    is_status = len(code) == 3 and code.isascii() and code.isdigit() and code[0] in "45"
    # SGLang wraps its error object in another object only if it is an event of a stream.
    return (int(code) if is_status else None), fields if "object" in fields else event


def with_body(request: Request, body: Mapping[str, Any], changed: Mapping[str, Any]) -> Request:
    """Return a request with another JSON body, in the format of OpenAI's client.

    Args:
        body: its body as it was.
        changed: the new body, which has all its fields.
    """
    headers = request.headers.copy()
    headers.pop("content-length", None)
    return type(request)(
        request.method,
        request.url,
        headers=headers,
        content=change_body(request.content, body, changed),
        extensions=request.extensions,
    )


class PassingAnswer:
    """Reads an answer from the bytes of a response as they pass, and reports it once.

    Args:
        on_text: the function to call with each piece of the answer's text; it must not raise.
        kind: what reads such answers.
    """

    def __init__(
        self,
        response: Any,
        observer: CallObserver,
        on_text: OnText,
        kind: type[AnswerReader] = AnswerReader,
    ) -> None:
        self._response = response
        self._observer = observer
        self._on_text = on_text
        self._is_encoded = "content-encoding" in response.headers
        # Given a stream, a response does not try to read a body.
        make = cast("Any", type(response))
        self._make_twin = partial(make, 200, headers=response.headers, stream=response.stream)
        self._is_stream = is_event_stream(response)
        self._reader = kind(is_stream=self._is_stream)
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
            self._on_text(text)
        if self._reader.is_over:
            self.end()

    def complete(self) -> None:
        """Report the answer, of which all bytes have passed."""
        if self._is_stream:
            self.end()
        elif not self._is_over:
            self._is_over = True
            content = b"".join(self._document)
            report_whole(self._response, content, self._observer, self._reader)

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
    response: Any, content: bytes, observer: CallObserver, reader: AnswerReader
) -> None:
    """Tell an observer of an answer, or of a refusal, of which all bytes are there.

    No text is reported on its way: when its first token came is not known.

    Args:
        response: the response, of httpx or httpx2.
        content: its whole body, without content encoding.
        reader: reads it.
    """
    if response.is_error:
        observer.on_failure(_make_refusal(response, content))
        return
    reader.feed(content)
    report_end(reader, observer)


def _make_refusal(response: Any, content: bytes) -> Exception:
    url = str(response.request.url)
    request = httpx.Request("POST", url)
    refusal = httpx.Response(response.status_code, content=content, request=request)
    return make_refusal(refusal, url.partition("/v1/")[0])


@contextmanager
def advising(url: str) -> Generator[None]:
    """Add a note to an error of OpenAI's client: which engine it is about and what to do.

    Args:
        url: the engine's.
    """
    try:
        yield
    except Exception as error:
        # Agent Framework raises its own exceptions from those of OpenAI's client.
        found = (_advice(each, url) for each in (error, error.__cause__))
        if advice := next(filter(None, found), None):
            error.add_note(f"FlashMoA: {url} {advice}")
        raise


def _advice(error: BaseException | None, url: str) -> str | None:
    # Other adapters do without this client.
    from openai import APIConnectionError, APITimeoutError, AuthenticationError, NotFoundError

    # Of a client that was closed it says that there was no connection, too.
    if isinstance(error, APIConnectionError) and not isinstance(error, APITimeoutError):
        if not isinstance(error.__cause__, http_module(error.request).TransportError):
            return None
        return "cannot be reached. Is the engine running? `flashmoa serve` starts one."
    if isinstance(error, AuthenticationError):
        return "refuses this API key, or needs one; give the client the right api_key=..."
    if isinstance(error, NotFoundError):
        return (
            "is not an engine, or this is not its URL. "
            f"`flashmoa doctor --engine {url}` tells more."
        )
    return None
