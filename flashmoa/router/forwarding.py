"""One request on its way to an engine, and its answer on the way back."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, AsyncExitStack

import aiohttp
import anyio
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from flashmoa._starlette import while_connected
from flashmoa.router.client_requests import ForwardedRequest, passed_on
from flashmoa.router.connections import Connections, reason
from flashmoa.router.dispatcher import Placement
from flashmoa.router.errors import EngineLost
from flashmoa.router.metrics import RouterMetrics

_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')
# The usage of a streamed answer is within this many bytes of its end.
_USAGE_BYTES = 4096


class AnswerObserver:
    """Hears an answer as it passes through the router."""

    def heard(self, piece: bytes) -> None:
        """Take the next piece of a stream, or all of an answer that is not streamed."""

    def computed(self, content: bytes | None = None) -> None:
        """Note that the prompt is computed. ``content``: the answer's end, once it is there."""

    def ended(self, ending: str) -> None:
        """Note how the answer ended: ``answered``, ``refused``, ``left`` or ``lost``."""


class PlacementObserver(AnswerObserver):
    """Learns from an answer that its prompt is computed, and how much of it was cached.

    Args:
        placement: of the request, if it was placed by the policy.
    """

    def __init__(
        self, metrics: RouterMetrics, engine: str, placement: Placement | None = None
    ) -> None:
        self._metrics = metrics
        self._engine = engine
        self._placement = placement

    def computed(self, content: bytes | None = None) -> None:
        if self._placement is not None:
            self._placement.computed()
        if content and (found := _CACHED.search(content)):
            self._metrics.cached(self._engine, int(found[1]))

    def ended(self, ending: str) -> None:
        self._metrics.ended(self._engine, ending)


async def forward(
    connections: Connections,
    call: ForwardedRequest,
    engine: str,
    observer: AnswerObserver,
    stack: AsyncExitStack,
) -> Response:
    """Return the engine's answer: whole, or as a stream that is passed on as it is read.

    The caller closes ``stack``, but a stream takes over what is on it and closes that when it is
    over. Nothing of a stream is read ahead of its client, and leaving it aborts the engine's
    request. Raises: EngineLost.
    """
    try:
        answer, content = await connections.exchange(
            call.method, engine + call.target, call.headers, call.body, call.repeat
        )
    except EngineLost as error:
        observer.ended("lost")
        raise EngineLost(f"{engine}: {error}", reached=error.reached) from error
    stack.callback(answer.close)
    headers = passed_on(answer.headers)
    if content is None:
        return RelayedStream(answer, headers, observer, stack.pop_all())
    if answer.ok:
        observer.heard(content)
        observer.computed(content)
    observer.ended("answered" if answer.ok else "refused")
    return Response(content, answer.status, headers)


class RelayedStream(StreamingResponse):
    """A stream on its way to the client. It frees everything even if the client never reads it.

    Attributes:
        until_hung: cancels its body once nothing more can come from the engine.
    """

    def __init__(
        self,
        answer: aiohttp.ClientResponse,
        headers: dict[str, str],
        observer: AnswerObserver,
        stack: AsyncExitStack,
    ) -> None:
        self._pieces = self._read(answer)
        super().__init__(self._pieces, answer.status, headers)
        self._observer = observer
        self._stack = stack
        self._ending = "left"
        self.until_hung: Callable[[], AbstractContextManager[anyio.CancelScope]] = anyio.CancelScope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with while_connected(Request(scope, receive)):
                with self.until_hung() as waiting:
                    await self.stream_response(send)
                if waiting.cancelled_caught:
                    self._ending = "lost"
                    end = _error_event("it hangs")
                    await send({"type": "http.response.body", "body": end, "more_body": False})
        finally:
            await self._release()

    async def drain(self) -> None:
        """Read the stream to its end for its observer, instead of passing it on."""
        try:
            async for _ in self._pieces:
                pass
        finally:
            await self._release()

    async def _release(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._pieces.aclose()
            self._observer.ended(self._ending)
            await self._stack.aclose()

    async def _read(self, answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
        end = b""
        try:
            async for piece in answer.content.iter_any():
                if not end:
                    self._observer.computed()
                self._observer.heard(piece)
                end = (end + piece)[-_USAGE_BYTES:]
                yield piece
            self._ending = "answered"
            self._observer.computed(end)
        except (aiohttp.ClientError, TimeoutError) as error:
            self._ending = "lost"
            yield _error_event(reason(error))


def _error_event(why: str) -> bytes:
    """Return the event that ends a stream whose engine was lost."""
    problem = {"message": f"The engine is gone: {why}", "code": 502}
    return f"data: {json.dumps({'error': problem})}\n\n".encode()
