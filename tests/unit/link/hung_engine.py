"""Serve the plugin's routes, some of which accept a request and never answer it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

from anyio.abc import SocketStream

from flashmoa.engine.wire import CALL_HEADER
from tests.unit.engine.faulty_engine import (
    BROKEN,
    CHANNEL,
    WORDS,
    Received,
    completion,
    listening,
    receive,
    send,
    send_line,
    start_lines,
    stream,
)
from tests.waiting import until

Route = Literal["render", "open", "append", "keep_alive", "delete", "prefill", "chat", "other"]


class HungEngine:
    """Serves any number of prompt streams.

    Attributes:
        hangs: routes that do not answer.
        lacks: routes that it does not have.
        gone: ids of streams that have expired.
        answers: the answers of other paths, which it does not have otherwise.
        ttl_seconds: how long its streams live, whatever they ask for.
        requests: every request so far, as (route, body), without channels; `chats` are those for
            answers.
        channels: the open channels, by id.
    """

    def __init__(self, url: str, hangs: tuple[Route, ...]) -> None:
        self.url = url
        self.hangs = set(hangs)
        self.lacks: set[Route] = set()
        self.gone: set[str] = set()
        self.answers: dict[str, Any] = {}
        self.ttl_seconds = 30.0
        self.requests: list[tuple[Route, dict[str, Any]]] = []
        self.chats: list[Received] = []
        self.channels: dict[str, SocketStream] = {}
        self._ids = (f"s{number}" for number in itertools.count())

    def routes(self) -> list[Route]:
        return [route for route, _ in self.requests]

    async def until(self, route: Route, times: int = 1) -> None:
        """Wait until it has received that many requests to a route."""
        await until(lambda: self.routes().count(route) >= times)

    async def serve(self, client: SocketStream) -> None:
        async with client:
            with suppress(*BROKEN):
                request = await receive(client)
                path, route = request.path, _route(request.method, request.path)
                if path == CHANNEL:
                    await self._keep_channel(client, request)
                    return
                self.requests.append((route, request.body))
                if route == "chat":
                    self.chats.append(request)
                if route in self.hangs:
                    await client.receive()  # This returns when the client disconnects.
                elif path in self.answers:
                    await send(client, 200, self.answers[path])
                elif route in self.lacks or route == "other":
                    await send(client, 404, {"detail": "Not Found"})
                elif path.split("/")[2:3] and path.split("/")[2] in self.gone:
                    error = {"message": "it has expired", "code": "stream_gone"}
                    await send(client, 410, {"error": error})
                else:
                    await self._answer(client, route, request)

    async def tell(self, call: Received, *words: str) -> None:
        """Tell the words of a call on its channel, which its client may open later."""
        name = call.headers[CALL_HEADER.lower()].replace("-", "")
        await until(lambda: name[:16] in self.channels)
        at = 0
        for word in words:
            line = {"call": name, "content": word, "at": at}
            await send_line(self.channels[name[:16]], line)
            at += len(word)

    async def _keep_channel(self, client: SocketStream, request: Received) -> None:
        await start_lines(client)
        await send_line(client, {"listening": True})
        channel = request.headers["x-flashmoa-channel"]
        self.channels[channel] = client
        try:
            await client.receive()  # This returns when the client disconnects.
        finally:
            del self.channels[channel]

    async def _answer(self, client: SocketStream, route: Route, request: Received) -> None:
        body = request.body
        if route == "chat":
            if body.get("max_tokens") == -1:
                await send(client, 400, {"error": {"message": "no", "code": "bad"}})
            elif body.get("stream"):
                await stream(client, "fine")
            else:
                await send(client, 200, completion(WORDS))
        elif route == "prefill":
            tokens = {"prompt_tokens": 9, "cached_tokens": 7, "prefilled_tokens": 2}
            await send(client, 200, {**tokens, "seconds": 0.1})
        elif route == "render":
            await send(client, 200, {"text": "\n".join(m["content"] for m in body["messages"])})
        else:
            state = {**STATE, "ttl_seconds": self.ttl_seconds}
            await send(client, 200, {**state, "id": next(self._ids), "next_seq": 0})


STATE = {
    "received_tokens": 1,
    "prefilled_tokens": 1,
    "computed_tokens": 1,
    "increments": 1,
    "ended": False,
    "ttl_seconds": 30.0,
    "pace_seconds": 0.01,
}


def _route(method: str, path: str) -> Route:
    if path == "/render":
        return "render"
    if path == "/prompt_streams":
        return "open"
    if path == "/prefill_only":
        return "prefill"
    if method == "DELETE":
        return "delete"
    if path.endswith("/append"):
        return "append"
    if path.endswith("/keep_alive"):
        return "keep_alive"
    return "chat" if path.endswith("/chat/completions") else "other"


@asynccontextmanager
async def hung_engine(*hangs: Route) -> AsyncGenerator[HungEngine]:
    async with listening(lambda url: HungEngine(url, hangs)) as engine:
        yield engine
