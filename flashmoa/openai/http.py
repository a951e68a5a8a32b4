"""Observe the answers that an OpenAI client asks for, in the HTTP client below it.

Every request passes there, below OpenAI's retry loop: those of ``create``, ``stream`` and
``parse``, of copies of the client, and of frameworks that were given it. Requests get headers;
their bodies, their answers, retries, exceptions and timeouts stay as they are. The text of a
streamed answer is read as it passes; the text of a whole answer comes by the engine's channel
(:class:`~flashmoa.link.hearing.CallChannel`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import httpx

from flashmoa.engine.connections import keep_by_loop
from flashmoa.engine.generation import is_event_stream
from flashmoa.engine.refusals import make_refusal
from flashmoa.engine.wire import STREAM_HEADER
from flashmoa.link.answers import AnswerReader, ResponseReader
from flashmoa.link.calls import CallObserver
from flashmoa.link.hearing import unheard_id
from flashmoa.link.response_items import as_chat
from flashmoa.openai.io import (
    BlockingIO,
    ObservedIO,
    Request,
    Response,
    finish,
    http_module,
    is_blocking,
)
from flashmoa.openai.requests import is_response, read_body

logger = logging.getLogger(__name__)

OnText = Callable[[str], None]
FindObserver = Callable[[Request, Mapping[str, Any]], CallObserver | None]

# By HTTP client, the functions that :func:`observe_completions` was given for it.
_finders: WeakKeyDictionary[Any, dict[Callable[[], FindObserver | None], None]] = (
    WeakKeyDictionary()
)


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
    client = BlockingIO(http) if is_blocking(http) else ObservedIO(http)
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
            _tell(observer.on_failure, error)
            raise

    def send_blocking(request: Request, **options: Any) -> Response:
        return finish(send(request, **options))

    http.send = send_blocking if is_blocking(http) else send


def stop_observing(http: Any, current: Callable[[], FindObserver | None]) -> None:
    """Undo :func:`observe_completions` with these arguments, however often it was called."""
    _finders.get(http, {}).pop(current, None)


async def _send_observed(
    client: ObservedIO,
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
    headers = dict(observer.headers)
    if observer.prompt_stream_id is not None:
        headers[STREAM_HEADER] = observer.prompt_stream_id
    on_text = _contained(observer.on_text)
    with ExitStack() as stack:
        if (channel := observer.channel) is not None:
            # The text of a stream is read as it passes.
            hearing = channel.hearing(on_text)
            call_id = unheard_id() if options.get("stream") else stack.enter_context(hearing)
            headers |= channel.headers(call_id)
            _tell(observer.on_named, call_id)
        stack.enter_context(_adding(headers, request))
        response = await client.send(request, **options)
    # A hook of the HTTP client may have read a stream already.
    if options.get("stream") and not response.is_closed:
        response.stream = client.watch(response, PassingAnswer(response, observer, on_text, kind))
        observer.on_response(partial(client.close, response))
    else:
        reader = kind(is_stream=is_event_stream(response))
        report_whole(response, response.content, observer, reader)
    return response


@contextmanager
def _adding(headers: Mapping[str, str], request: Request) -> Generator[None]:
    """Give a request more headers while it is sent. Those that it has itself stay as they are.

    The program may send the same object again.
    """
    added = {name: value for name, value in headers.items() if name not in request.headers}
    request.headers.update(added)
    try:
        yield
    finally:
        for name in added:
            request.headers.pop(name, None)


def _tell(observe: Callable[[Any], None], news: object) -> None:
    """Tell an observer; whatever is wrong with it, the program gets its answer or its error."""
    try:
        observe(news)
    except Exception:
        logger.exception("An observer of a call failed; the call goes on")


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
        _tell(observer.on_finish, result)
    else:
        _tell(observer.on_failure, error or RuntimeError(reader.problem))


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
        _tell(observer.on_failure, _make_refusal(response, content))
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
