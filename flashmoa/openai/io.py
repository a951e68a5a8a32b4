"""Do the input and output of the HTTP client below an OpenAI client, as before it was observed.

The same coroutines observe both kinds of HTTP clients. With a synchronous one (:class:`BlockingIO`)
they never suspend: all input and output is done in the thread that calls, where :func:`finish` runs
them without an event loop.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar, cast

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


class ObservedIO:
    """Uses an HTTP client as it is before its ``send`` is replaced.

    Args:
        http: an ``AsyncClient`` of httpx or httpx2.
    """

    def __init__(self, http: Any) -> None:
        self._http = http
        self._earlier: Callable[..., Any] | None = cast("dict[str, Any]", vars(http)).get("send")

    async def send(self, request: Request, **options: Any) -> Response:
        return await self._send(request, **options)

    async def close(self, response: Response) -> None:
        await response.aclose()

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


class BlockingIO(ObservedIO):
    """Uses a synchronous HTTP client in the same way; no coroutine suspends.

    Args:
        http: a ``Client`` of httpx or httpx2.
    """

    async def send(self, request: Request, **options: Any) -> Response:
        return self._send(request, **options)

    async def close(self, response: Response) -> None:
        response.close()

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
