"""Forward a request to an engine (`forward`), and relay its answer, which observers can read."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import aiohttp
import anyio
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from flashmoa._starlette import while_connected
from flashmoa.router.client_requests import ForwardedRequest, select_forwarded_headers
from flashmoa.router.connections import Connections, describe_error
from flashmoa.router.dispatcher import Placement
from flashmoa.router.errors import EngineLost
from flashmoa.router.metrics import RouterMetrics

_PROMPT_TOKENS = re.compile(rb'"prompt_tokens"\s*:\s*(\d+)')
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')
# The number of an answer, of those to a list. A quotation mark in a text would be escaped.
_INDEX = re.compile(rb'"index"\s*:\s*(\d+)')
_EVENT_END = b"\n\n"
# The usage of a streamed answer is within this many bytes of its end.
_USAGE_BYTES = 4096


class AnswerObserver:
    """Reads an answer while the router relays it."""

    def receive(self, content: bytes) -> None:
        """Process the next piece of a stream, or all of a successful answer without streaming."""

    def end(self, ending: str) -> None:
        """Process the end of the answer: ``answered``, ``refused``, ``left`` or ``lost``."""


class PlacementObserver(AnswerObserver):
    """Learns from an answer that its prompt is computed, and how much of it was cached.

    The first piece of an answer shows that a prompt is computed. Of a streamed list of prompts,
    each is computed when its first event comes.

    Args:
        placement: the request's placement, if it has one.
        samples: number of answers to each prompt, which are numbered consecutively.
    """

    def __init__(
        self,
        metrics: RouterMetrics,
        engine: str,
        placement: Placement | None = None,
        samples: int = 1,
    ) -> None:
        self._metrics = metrics
        self._engine = engine
        self._placement = placement
        self._samples = samples
        # The prompts of a list whose first events have come, and the beginning of the next event.
        self._begun: set[int] = set()
        self._partial = b""
        self._tail = b""

    def receive(self, content: bytes) -> None:
        placement = self._placement
        if placement is not None and placement.items_left > 0:
            # Most pieces of a list's answer complete no prompt; a round of routing would be lost.
            computed = self._count_computed(content, placement.is_list)
            if computed > 0:
                placement.finish_prefill(computed)
        # An answer without streaming is a single piece, and its usage may be anywhere in it.
        self._tail = (self._tail + content)[-max(_USAGE_BYTES, len(content)) :]

    def _count_computed(self, content: bytes, is_list: bool) -> int:
        """Return how many prompts the next piece of an answer shows to be computed."""
        if not is_list:
            return 1
        before = len(self._begun)
        *events, self._partial = (self._partial + content).split(_EVENT_END)
        found = (_INDEX.search(event) for event in events)
        self._begun.update(int(index[1]) // self._samples for index in found if index)
        return len(self._begun) - before

    def end(self, ending: str) -> None:
        if ending == "answered" and self._placement is not None:
            self._placement.finish_prefill()
        if ending == "answered" and (cached := self._usage(_CACHED_TOKENS)):
            self._metrics.count_cached(self._engine, cached=cached, of=self._usage(_PROMPT_TOKENS))
        self._metrics.count_ending(self._engine, ending)

    def _usage(self, field: re.Pattern[bytes]) -> list[int]:
        """Return a field of the usage: of each prompt of a whole answer, or a stream's last one."""
        found = [int(number) for number in field.findall(self._tail)]
        is_whole = self._tail.startswith((b"{", b"["))
        return found if is_whole else found[-1:]


async def forward(
    connections: Connections,
    call: ForwardedRequest,
    engine: str,
    observer: AnswerObserver,
    stack: AsyncExitStack,
) -> Response:
    """Return the engine's answer: a whole one, or a stream that is relayed as it is read.

    A stream is not read ahead of its client, and if the client leaves, the engine's request is
    aborted.

    Args:
        engine: URL of the engine.
        stack: is closed by the caller. A stream takes over its contents, and closes them at its
            end.

    Raises: EngineLost if there is no answer.
    """
    try:
        answer, content = await connections.exchange(
            call.method, engine + call.target, call.headers, call.body, call.retry_rule
        )
    except EngineLost as error:
        observer.end("lost")
        raise EngineLost(f"{engine}: {error}", reached=error.reached) from error
    except anyio.get_cancelled_exc_class():
        observer.end("left")
        raise
    stack.callback(answer.close)
    if content is None:
        return RelayedStream(answer, observer, stack.pop_all())
    if answer.ok:
        observer.receive(content)
    observer.end("answered" if answer.ok else "refused")
    return Response(content, answer.status, select_forwarded_headers(answer.headers))


class RelayedStream(StreamingResponse):
    """Relays a stream to the client, and releases everything even if the client never reads it."""

    def __init__(
        self,
        answer: aiohttp.ClientResponse,
        observer: AnswerObserver,
        stack: AsyncExitStack,
    ) -> None:
        self._pieces = self._read(answer)
        super().__init__(self._pieces, answer.status, select_forwarded_headers(answer.headers))
        self._observer = observer
        self._stack = stack
        self._ending = "left"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with while_connected(Request(scope, receive)):
                await self.stream_response(send)
        finally:
            await self._release()

    async def drain(self) -> None:
        """Read the stream to its end for its observer, instead of relaying it."""
        try:
            async for _ in self._pieces:
                pass
        finally:
            await self._release()

    async def _release(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._pieces.aclose()
            self._observer.end(self._ending)
            await self._stack.aclose()

    async def _read(self, answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
        piece = _EVENT_END
        try:
            async for piece in answer.content.iter_any():
                self._observer.receive(piece)
                yield piece
            self._ending = "answered"
        except (aiohttp.ClientError, TimeoutError) as error:
            self._ending = "lost"
            # The engine may have sent only the beginning of an event.
            if not piece.endswith(_EVENT_END):
                yield _EVENT_END
            yield _make_error_event(describe_error(error))


def _make_error_event(reason: str) -> bytes:
    """Return the event that ends a stream whose engine was lost."""
    error = {"message": f"The engine is gone: {reason}; send the request again", "code": 502}
    return f"data: {json.dumps({'error': error})}\n\n".encode()
