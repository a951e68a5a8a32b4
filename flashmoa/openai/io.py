"""Send requests and read answers with an HTTP client whose ``send`` is replaced by an observer.

The same coroutines observe both kinds of HTTP clients. With a synchronous client
(:class:`BlockingIO`) they never suspend: the calling thread does all input and output, and
:func:`finish` runs the coroutine without an event loop.
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
    """Return the module of a request or response: httpx or httpx2."""
    return sys.modules[type(request).__module__.partition(".")[0]]


def finish(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that never suspends, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} has to wait for an event loop")


class PassingBytes(Protocol):
    """Receives the bytes of an answer on their way to its reader."""

    def feed(self, data: bytes) -> None: ...
    def complete(self) -> None: ...
    def end(self, error: BaseException | None = None) -> None: ...


class ObservedIO:
    """Uses an asynchronous HTTP client of httpx or httpx2, as it is when this is made."""

    def __init__(self, http: Any) -> None:
        self._http = http
        self._earlier: Callable[..., Any] | None = cast("dict[str, Any]", vars(http)).get("send")

    async def send(self, request: Request, **options: Any) -> Response:
        return await self._send(request, **options)

    async def close(self, response: Response) -> None:
        await response.aclose()

    def watch(self, response: Response, answer: PassingBytes) -> Any:
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
