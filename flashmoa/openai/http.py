"""Observe the answers that an OpenAI client asks for, in the HTTP client below it.

All requests of the client, its copies and the frameworks that use it pass through ``send`` of the
HTTP client, below OpenAI's retry loop. Requests get headers; their bodies, answers, retries,
exceptions and timeouts stay as they are. The text of a streamed answer is read as it passes. The
text of a whole answer comes by the engine's channel (:class:`~flashmoa.link.hearing.CallChannel`).

The same coroutines observe both kinds of HTTP clients. With a synchronous client
(:class:`BlockingIO`) they never suspend: the calling thread does all input and output, and
:func:`~flashmoa._concurrency.finish` runs the coroutine without an event loop.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import httpx
from pydantic_core import from_json

from flashmoa._concurrency import finish
from flashmoa.engine.connections import keep_by_loop
from flashmoa.engine.generation import is_event_stream
from flashmoa.engine.refusals import make_refusal
from flashmoa.engine.wire import STREAM_HEADER
from flashmoa.link.answers import AnswerReader, ResponseReader
from flashmoa.link.calls import CallObserver
from flashmoa.link.hearing import unheard_id
from flashmoa.link.response_items import as_chat

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# OpenAI's client 3 is built on httpx2, earlier ones on httpx. Both have the same interface, but
# share no types.
Request: TypeAlias = Any
Response: TypeAlias = Any
OnText = Callable[[str], None]
FindObserver = Callable[[Request, Mapping[str, Any]], CallObserver | None]

# By HTTP client, the arguments ``current`` of :func:`observe_completions`.
_finders: WeakKeyDictionary[Any, dict[Callable[[], FindObserver | None], None]] = (
    WeakKeyDictionary()
)


def observe_completions(http: Any, current: Callable[[], FindObserver | None]) -> bool:
    """Observe the requests for answers of an HTTP client. Repeating this is harmless.

    Each attempt of a retried request is a request of its own.

    Args:
        http: an ``AsyncClient`` or a ``Client`` of httpx or httpx2.
        current: returns the function that finds the observer of a request in this context, given
            the request and its body; ``None`` if nothing in this context is observed. If several
            functions were given for a client, the first one with an observer counts.

    Returns: whether this function has not observed the client before.
    """
    if http in _finders:
        is_new = current not in _finders[http]
        _finders[http].setdefault(current)
        return is_new
    finders = _finders[http] = {current: None}
    is_async = hasattr(http, "aclose")
    client = ObservedIO(http) if is_async else BlockingIO(http)
    # OpenAI's own HTTP client keeps connections that work in a single event loop. In the next loop
    # (of the next `asyncio.run`) their requests fail and are repeated, and they cannot be closed.
    if type(http).__name__ == "AsyncHttpxClientWrapper" and isinstance(http, httpx.AsyncClient):
        keep_by_loop(http)

    async def send(request: Request, **options: Any) -> Response:
        found = [find for each in tuple(finders) if (find := each()) is not None]
        # Bodies may have megabytes: only observed contexts parse them.
        body = read_body(request) if found else None
        observers = (find(request, body) for find in found) if body is not None else ()
        observer = next(filter(None, observers), None)
        if body is None or observer is None:
            return await client.send(request, **options)
        try:
            return await _send_observed(client, request, body, options, observer)
        except BaseException as error:
            _tell(observer.on_failure, error)
            raise

    def send_blocking(request: Request, **options: Any) -> Response:
        return finish(send(request, **options))

    http.send = send if is_async else send_blocking
    return True


def stop_observing(http: Any, current: Callable[[], FindObserver | None]) -> None:
    """Undo :func:`observe_completions`, also if it was called repeatedly."""
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
        # The server, not this module, refuses a bad request.
        logger.exception("A prompt could not be reported; the request is sent all the same")
    headers = dict(observer.headers)
    if observer.prompt_stream_id is not None:
        headers[STREAM_HEADER] = observer.prompt_stream_id
    on_text = _contained(observer.on_text)
    with ExitStack() as stack:
        if (channel := observer.channel) is not None:
            # The channel tells no text of a stream, which is read as it passes.
            hearing = channel.hearing(on_text)
            call_id = unheard_id() if options.get("stream") else stack.enter_context(hearing)
            headers |= channel.headers(call_id)
            _tell(observer.on_named, call_id)
        stack.enter_context(_adding(headers, request))
        response = await client.send(request, **options)
    try:
        # A hook of the HTTP client may have read a stream already.
        if options.get("stream") and not response.is_closed:
            answer = PassingAnswer(response, observer, on_text, kind)
            response.stream = client.watch(response, answer)
            observer.on_response(partial(client.close, response))
        else:
            reader = kind(is_stream=is_event_stream(response))
            _report_whole(response, response.content, observer, reader)
    except Exception as problem:
        # The server has answered: OpenAI's client would ask it again.
        logger.exception("An observer of a call failed; the call goes on")
        _tell(observer.on_failure, problem)
    return response


def read_body(request: Any) -> dict[str, Any] | None:
    """Return the body of a chat completion or a request of the Responses API, else ``None``.

    Args:
        request: a request of httpx or httpx2.
    """
    is_chat = request.url.path.endswith("/chat/completions")
    if request.method != "POST" or not (is_chat or is_response(request)):
        return None
    try:
        body = _decode(request.content)
    except (ValueError, RuntimeError):  # RequestNotRead: the body is made while it is sent.
        return None
    return cast("dict[str, Any]", body) if isinstance(body, dict) else None


def is_response(request: Any) -> bool:
    """Return whether a request for an answer is of the Responses API."""
    return request.url.path.endswith("/responses")


def _decode(content: bytes) -> object:
    try:
        return from_json(content)  # Several times as fast as ``json``.
    except ValueError:  # It refuses half a surrogate pair.
        return json.loads(content.decode())


@contextmanager
def _adding(headers: Mapping[str, str], request: Request) -> Generator[None]:
    """Add headers that a request lacks while it is sent: the program may send it again."""
    added = {name: value for name, value in headers.items() if name not in request.headers}
    request.headers.update(added)
    try:
        yield
    finally:
        for name in added:
            request.headers.pop(name, None)


def _tell(observe: Callable[[Any], None], news: object) -> None:
    """Tell an observer; if it fails, the program still gets its answer or its error."""
    try:
        observe(news)
    except Exception:
        logger.exception("An observer of a call failed; the call goes on")


def _contained(on_text: OnText) -> OnText:
    """Return a function that calls ``on_text`` until it fails; OpenAI's client would then retry."""
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


def http_module(request: Request) -> Any:
    """Return the module of a request or response: httpx or httpx2."""
    names = (kind.__module__.partition(".")[0] for kind in type(request).__mro__)
    return sys.modules[next(name for name in names if name in ("httpx", "httpx2"))]


class ObservedIO:
    """Uses an asynchronous HTTP client of httpx or httpx2, as it is when this is made."""

    def __init__(self, http: Any) -> None:
        self._http = http
        self._earlier: Callable[..., Any] | None = cast("dict[str, Any]", vars(http)).get("send")

    async def send(self, request: Request, **options: Any) -> Response:
        return await self._send(request, **options)

    async def close(self, response: Response) -> None:
        await response.aclose()

    def watch(self, response: Response, answer: PassingAnswer) -> Any:
        """Return the byte stream of a response, which tells ``answer`` the bytes that are read."""
        base: Any = http_module(response).AsyncByteStream
        stream = response.stream

        class WatchedStream(base):  # httpx accepts no other iterators.
            async def __aiter__(self) -> AsyncIterator[bytes]:
                with _passing(answer):
                    async for data in stream:
                        # Observers get the text before the reader, who may act upon it.
                        answer.feed(data)
                        yield data

            async def aclose(self) -> None:
                answer.end()
                await stream.aclose()

        return WatchedStream()

    def _send(self, request: Request, **options: Any) -> Any:
        # A later patch of the class takes effect, as this looks the method up at each call.
        send = self._earlier or partial(cast("Any", type(self._http)).send, self._http)
        return send(request, **options)


class BlockingIO(ObservedIO):
    """Uses a synchronous HTTP client of httpx or httpx2; no coroutine suspends."""

    async def send(self, request: Request, **options: Any) -> Response:
        return self._send(request, **options)

    async def close(self, response: Response) -> None:
        response.close()

    def watch(self, response: Response, answer: PassingAnswer) -> Any:
        base: Any = http_module(response).SyncByteStream
        stream = response.stream

        class WatchedBlockingStream(base):
            def __iter__(self) -> Iterator[bytes]:
                with _passing(answer):
                    for data in stream:
                        answer.feed(data)
                        yield data

            def close(self) -> None:
                answer.end()
                stream.close()

        return WatchedBlockingStream()


@contextmanager
def _passing(answer: PassingAnswer) -> Generator[None]:
    """Tell ``answer`` how its bytes end, which are read in the block."""
    try:
        yield
    except GeneratorExit:  # The reader has left.
        answer.end()
        raise
    except BaseException as error:
        answer.end(error)
        raise
    answer.complete()


class PassingAnswer:
    """Reads an answer from the bytes of a response as they pass, and reports it once.

    Args:
        on_text: is called with each piece of the answer's text; it must not raise.
        kind: the class that reads such answers.
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
            # The bytes still pass, and their reader gets its own error.
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
        """Report the answer; all its bytes have passed."""
        if self._is_stream:
            self.end()
        elif not self._is_over:
            self._is_over = True
            content = b"".join(self._document)
            _report_whole(self._response, content, self._observer, self._reader)

    def end(self, error: BaseException | None = None) -> None:
        """Report the answer; no more bytes will be read, because of ``error`` if it is given."""
        if not self._is_over:
            self._is_over = True
            _report_end(self._reader, self._observer, error)

    def _decode(self, data: bytes) -> bytes:
        """Undo the content encoding (``gzip``) of the next bytes."""
        if "content-encoding" not in self._response.headers:
            return data
        decoded: Any = self._decoder.decode(data)
        # httpx2 returns pieces.
        return decoded if isinstance(decoded, bytes) else b"".join(decoded)

    @cached_property
    def _decoder(self) -> Any:
        # The response's own decoder has a state for the response's reader, so a twin gives another.
        # A response that is made with a stream does not read it.
        response = self._response
        twin: Any = type(response)(200, headers=response.headers, stream=response.stream)
        return twin._get_content_decoder()


def _report_end(
    reader: AnswerReader, observer: CallObserver, error: BaseException | None = None
) -> None:
    """Tell an observer the answer that was read, or why it is not complete."""
    result = reader.result()
    if result is not None:
        _tell(observer.on_finish, result)
    else:
        _tell(observer.on_failure, error or RuntimeError(reader.problem))


def _report_whole(
    response: Any, content: bytes, observer: CallObserver, reader: AnswerReader
) -> None:
    """Tell an observer an answer or a refusal that came as a whole.

    ``on_text`` is not called, because the time of its first token is not known.

    Args:
        content: the whole body, without content encoding.
    """
    if response.is_error:
        url = str(response.request.url)
        request = httpx.Request("POST", url)
        refusal = httpx.Response(response.status_code, content=content, request=request)
        _tell(observer.on_failure, make_refusal(refusal, url.partition("/v1/")[0]))
        return
    reader.feed(content)
    _report_end(reader, observer)


@contextmanager
def advising(url: str) -> Generator[None]:
    """Add a note to errors of OpenAI's client: the engine's URL, and what to do."""
    try:
        yield
    except Exception as error:
        # Agent Framework raises its own exceptions, caused by exceptions of OpenAI's client.
        found = (_advice(each, url) for each in (error, error.__cause__))
        if advice := next(filter(None, found), None):
            error.add_note(f"FlashMoA: {url} {advice}")
        raise


def _advice(error: BaseException | None, url: str) -> str | None:
    # This module also serves adapters that work without OpenAI's client.
    from openai import APIConnectionError, APITimeoutError, AuthenticationError, NotFoundError

    # OpenAI's client raises the same error if it was closed.
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
