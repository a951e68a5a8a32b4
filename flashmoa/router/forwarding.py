"""One request on its way to an engine and back."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Protocol, Self
from urllib.parse import quote

import aiohttp
import anyio
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from flashmoa._starlette import while_connected
from flashmoa.router.connections import Connections, EngineLost, reason
from flashmoa.router.counters import Counters
from flashmoa.router.dispatcher import Place
from flashmoa.router.paths import Repeat, repeat

# Those of one connection, and those that the client and the server write themselves.
_NOT_PASSED_ON = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    # The body is here.
    "expect",
    "host",
    "content-length",
    "content-encoding",
    "accept-encoding",
    "date",
    "server",
}
_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')
_NOT_SENT = re.compile(rb"[^\x21-\x7e]")
# Bytes of a stream's end in which its usage stands.
_END = 4096


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it is passed on.

    Attributes:
        path: by which it was routed. target: the path and the query as they were sent, in ASCII.
    """

    method: str
    path: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def repeat(self) -> Repeat:
        """When it may be sent again."""
        return repeat(self.method, self.path)

    @classmethod
    def of(cls, request: Request, body: bytes) -> Self:
        """What a router was asked."""
        path: str = request.scope["path"]
        # Not from the request's URL, of which the client's Host header is a part.
        raw: bytes = request.scope.get("raw_path") or quote(path).encode()
        if query := request.scope["query_string"]:
            raw += b"?" + query
        # Some web servers let other bytes in, and all send only these.
        target = _NOT_SENT.sub(lambda found: b"%%%02X" % found[0][0], raw).decode()
        return cls(request.method, path, target, passed_on(request.headers), body)


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that go on, the API key among them."""
    return {name: value for name, value in headers.items() if name.lower() not in _NOT_PASSED_ON}


def api_key(headers: Mapping[str, str]) -> dict[str, str]:
    """A client's API key, for questions that are asked on its behalf, and only with its rights."""
    found = {name.lower(): value for name, value in headers.items()}
    return {"authorization": found["authorization"]} if "authorization" in found else {}


async def forward(
    connections: Connections,
    call: Call,
    engine: str,
    tally: Audience,
    stack: AsyncExitStack,
) -> Response:
    """The engine's answer: whole, or as a stream that is passed on as it is read.

    ``stack`` is the caller's to close; that of a stream closes it itself when it is over. Nothing
    of a stream is read ahead of its client, and leaving it aborts the engine's request.
    Raises: EngineLost.
    """
    try:
        answer, content = await connections.exchange(
            call.method, engine + call.target, call.headers, call.body, call.repeat
        )
    except EngineLost as error:
        tally.ended("lost")
        raise EngineLost(f"{engine}: {error}", reached=error.reached) from error
    stack.callback(answer.close)
    headers = passed_on(answer.headers)
    if content is None:
        return Relay(answer, headers, tally, stack.pop_all())
    if answer.ok:
        tally.heard(content)
        tally.computed(content)
    tally.ended("answered" if answer.ok else "refused")
    return Response(content, answer.status, headers)


class Audience(Protocol):
    """Learns from an answer as it passes."""

    def heard(self, piece: bytes) -> None:
        """The next piece of a stream, or all of an answer that is none."""
        ...

    def computed(self, content: bytes | None = None) -> None:
        """Its prompt is computed. ``content``: the answer's end, once it is there."""
        ...

    def ended(self, ending: str) -> None:
        """``answered``, ``refused``, ``left`` or ``lost``."""
        ...


class Tally:
    """What is learned from an answer: that the prompt is computed, and how much of it was."""

    def __init__(self, counters: Counters, engine: str, place: Place | None = None) -> None:
        self._counters = counters
        self._engine = engine
        self._place = place

    def heard(self, piece: bytes) -> None:
        """What an answer says is not the router's business."""

    def computed(self, content: bytes | None = None) -> None:
        if self._place is not None:
            self._place.computed()
        if content and (found := _CACHED.search(content)):
            self._counters.cached(self._engine, int(found[1]))

    def ended(self, ending: str) -> None:
        self._counters.ended(self._engine, ending)


class Relay(StreamingResponse):
    """A stream on its way through; gives everything back even if its client never reads it."""

    def __init__(
        self,
        answer: aiohttp.ClientResponse,
        headers: dict[str, str],
        tally: Audience,
        stack: AsyncExitStack,
    ) -> None:
        self._pieces = self._read(answer)
        super().__init__(self._pieces, answer.status, headers)
        self._tally = tally
        self._stack = stack
        self._ending = "left"
        # Cancelled where nothing more will come.
        self.attended: Callable[[], AbstractContextManager[anyio.CancelScope]] = anyio.CancelScope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with while_connected(Request(scope, receive)):
                with self.attended() as waiting:
                    await self.stream_response(send)
                if waiting.cancelled_caught:
                    self._ending = "lost"
                    end = _lost("it hangs")
                    await send({"type": "http.response.body", "body": end, "more_body": False})
        finally:
            await self._give_back()

    async def drain(self) -> None:
        """Read it to its end for who listens, instead of passing it on."""
        try:
            async for _ in self._pieces:
                pass
        finally:
            await self._give_back()

    async def _give_back(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._pieces.aclose()
            self._tally.ended(self._ending)
            await self._stack.aclose()

    async def _read(self, answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
        end = b""
        try:
            async for piece in answer.content.iter_any():
                if not end:
                    self._tally.computed()
                self._tally.heard(piece)
                end = (end + piece)[-_END:]
                yield piece
            self._ending = "answered"
            self._tally.computed(end)
        except (aiohttp.ClientError, TimeoutError) as error:
            self._ending = "lost"
            yield _lost(reason(error))


def _lost(why: str) -> bytes:
    """The last event of a stream that breaks."""
    problem = {"message": f"The engine is gone: {why}", "code": 502}
    return f"data: {json.dumps({'error': problem})}\n\n".encode()
