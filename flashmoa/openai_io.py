"""Do the input and output of the HTTP client below an OpenAI client, as before it was observed.

The same coroutines observe both kinds of HTTP clients. With a synchronous one (:class:`BlockingIO`)
they never suspend: all input and output is done in the thread that calls, where :func:`finish` runs
them without an event loop.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import anyio

Result = TypeVar("Result")

# OpenAI's client 3 is built on httpx2, earlier ones on httpx. Both have the same interface, but
# share no types.
Request: TypeAlias = Any
Response: TypeAlias = Any


def http_module(request: Request) -> Any:
    """Return httpx or httpx2, whichever a request is of."""
    return sys.modules[type(request).__module__.partition(".")[0]]


def is_blocking(http: Any) -> bool:
    """Return whether an HTTP client is synchronous."""
    return not hasattr(http, "aclose")


def finish(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Return what a coroutine returns that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} has to wait for an event loop")


class PassingBytes(Protocol):
    """Hears of an answer whose bytes pass to its reader."""

    def feed(self, data: bytes) -> None: ...
    def complete(self) -> None: ...
    def end(self, error: BaseException | None = None) -> None: ...


class UntappedIO:
    """Uses an HTTP client as it is before its ``send`` is replaced.

    Args:
        http: an ``AsyncClient`` of httpx or httpx2.
    """

    def __init__(self, http: Any) -> None:
        self._http = http
        self._earlier: Callable[..., Any] | None = cast("dict[str, Any]", vars(http)).get("send")

    @property
    def has_response_hooks(self) -> bool:
        """Whether functions of its user read the responses, which expect them as they were."""
        return bool(self._http.event_hooks["response"])

    async def send(self, request: Request, **options: Any) -> Response:
        return await self._send(request, **options)

    async def close(self, response: Response) -> None:
        await response.aclose()

    async def read(self, response: Response) -> None:
        await response.aread()

    async def run(self, function: Callable[[], Result]) -> Result:
        """Run a function that blocks, beside the event loop if there is one."""
        # Threads of the program's own functions may all be busy.
        limiter = anyio.CapacityLimiter(1)
        return await anyio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=limiter)

    def pieces(self, response: Response) -> AsyncGenerator[bytes]:
        """Yield the bytes of a response's body, without content encoding, as they arrive."""
        return response.aiter_bytes()

    def time_limit(
        self, _response: Response, seconds: float | None
    ) -> AbstractContextManager[object]:
        """Leave the block, or raise the HTTP client's ``ReadTimeout``, when its time is up.

        It gives ``None`` where nothing can limit the time.
        """
        return anyio.move_on_after(seconds)

    def trace(self, hear: Callable[[str], None]) -> Callable[..., Any]:
        """Return the request's extension that has the names of its events passed to ``hear``."""

        async def trace(event: str, _: object) -> None:
            hear(event)

        return trace

    def watch(self, response: Response, answer: PassingBytes) -> Any:
        """Return the byte stream of a response as one that tells of its answer."""
        base: Any = http_module(response).AsyncByteStream
        stream = response.stream

        class WatchedStream(base):  # httpx accepts no other iterators.
            async def __aiter__(self) -> AsyncIterator[bytes]:
                with _passing(answer):
                    async for data in stream:
                        # Observers get the text before the reader may act upon it.
                        answer.feed(data)
                        yield data

            async def aclose(self) -> None:
                answer.end()
                await stream.aclose()

        return WatchedStream()

    def _send(self, request: Request, **options: Any) -> Any:
        # Looked up at each call, so that a patch of the class still takes effect.
        send = self._earlier or partial(cast("Any", type(self._http)).send, self._http)
        return send(request, **options)


class TimedRead:
    """Reads from a connection, by deadlines of the threads that read.

    It stays on its connection: after the last byte of a response another thread may use that at
    once, so that nothing may be taken off it then.
    """

    def __init__(self, read: Callable[..., bytes]) -> None:
        self._read = read
        self._limits: dict[int, tuple[float, Callable[[], Exception]]] = {}

    def __call__(self, max_bytes: int, timeout: float | None = None) -> bytes:
        limit = self._limits.get(threading.get_ident())
        if limit is not None:
            deadline, expired = limit
            left = deadline - time.monotonic()
            if left <= 0:
                raise expired()
            timeout = left if timeout is None else min(timeout, left)
        return self._read(max_bytes, timeout)

    @contextmanager
    def limit(self, deadline: float, error: Any, response: Response) -> Generator[None]:
        """Raise ``error`` in what this thread reads after ``deadline``, or that of a limit around.

        Args: deadline: by ``time.monotonic()``.
        """
        reader = threading.get_ident()
        around = self._limits.get(reader)
        if around is None or deadline < around[0]:
            self._limits[reader] = deadline, partial(error, "", request=response.request)
        try:
            yield
        finally:
            if around is None:
                del self._limits[reader]
            else:
                self._limits[reader] = around


def _timed_read(response: Response) -> TimedRead | None:
    """Return how a response's connection is read; ``None`` if limits would hold for others, too.

    Several requests share a connection of HTTP/2.
    """
    network = response.extensions.get("network_stream")
    if network is None or response.http_version == "HTTP/2":
        return None
    if not isinstance(network.read, TimedRead):
        try:
            network.read = TimedRead(network.read)
        except AttributeError:  # It is a stream of a transport of its user's.
            return None
    return network.read


class BlockingIO(UntappedIO):
    """Uses a synchronous HTTP client in the same way; no coroutine suspends.

    Args:
        http: a ``Client`` of httpx or httpx2.
    """

    async def send(self, request: Request, **options: Any) -> Response:
        return self._send(request, **options)

    async def close(self, response: Response) -> None:
        response.close()

    async def read(self, response: Response) -> None:
        response.read()

    async def run(self, function: Callable[[], Result]) -> Result:
        return function()

    async def pieces(self, response: Response) -> AsyncGenerator[bytes]:
        for piece in response.iter_bytes():
            yield piece

    @contextmanager
    def time_limit(self, response: Response, seconds: float | None) -> Generator[TimedRead | None]:
        # The read timeout of a request holds for each read, so each of them is given less.
        timed = _timed_read(response)
        if seconds is None or timed is None:
            yield timed
            return
        with timed.limit(time.monotonic() + seconds, http_module(response).ReadTimeout, response):
            yield timed

    def trace(self, hear: Callable[[str], None]) -> Callable[..., Any]:
        def trace(event: str, _: object) -> None:
            hear(event)

        return trace

    def watch(self, response: Response, answer: PassingBytes) -> Any:
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
def _passing(answer: PassingBytes) -> Generator[None]:
    """Tell how the bytes of an answer end that pass in the block."""
    try:
        yield
    except GeneratorExit:  # The reader has left.
        answer.end()
        raise
    except BaseException as error:
        answer.end(error)
        raise
    answer.complete()
