"""Serve the plugin's routes; some routes accept a request and never answer it."""

import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import anyio
from anyio.abc import SocketStream

from flashmoa import EngineClient, EngineSettings, Text, Workflow
from flashmoa.engine.wire import CALL_HEADER
from flashmoa.link.link import Link
from flashmoa.link.prompt import Prompt, Slot
from flashmoa.observe import Event
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
        lacks: missing routes.
        gone: ids of expired streams.
        answers: answers of further paths.
        ttl_seconds: how long a stream lives, whatever its client asks for.
        requests: every request so far, as (route, body), without channels.
        received: the same requests with their headers, and the requests for channels.
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
        self.received: list[tuple[Route, Received]] = []
        self.channels: dict[str, SocketStream] = {}
        self._ids = (f"s{number}" for number in itertools.count())

    def routes(self) -> list[Route]:
        return [route for route, _ in self.requests]

    def bodies(self, route: Route) -> list[dict[str, Any]]:
        return [body for each, body in self.requests if each == route]

    def headers(self, *routes: Route) -> list[dict[str, str]]:
        """Return the headers of all requests so far, or of the requests to some routes."""
        found = [request for each, request in self.received if not routes or each in routes]
        return [request.headers for request in found]

    async def until(self, route: Route, times: int = 1) -> None:
        """Wait until a route has received N requests."""
        await until(lambda: self.routes().count(route) >= times)

    async def serve(self, client: SocketStream) -> None:
        async with client:
            with suppress(*BROKEN):
                request = await receive(client)
                path, route = request.path, _route(request.method, request.path)
                self.received.append((route, request))
                if path == CHANNEL:
                    await self._keep_channel(client, request)
                    return
                self.requests.append((route, request.body))
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
        for place, word in enumerate(words):
            line = {"call": name, "content": word, "at": len("".join(words[:place]))}
            await send_line(self.channels[name[:16]], line)

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


# The route of each path, by the path's last part.
_ROUTES: dict[str, Route] = {
    "render": "render", "prompt_streams": "open", "append": "append", "keep_alive": "keep_alive",
    "prefill_only": "prefill", "completions": "chat",
}  # fmt: skip


def _route(method: str, path: str) -> Route:
    return "delete" if method == "DELETE" else _ROUTES.get(path.rpartition("/")[2], "other")


@asynccontextmanager
async def hung_engine(*hangs: Route) -> AsyncGenerator[HungEngine]:
    async with listening(lambda url: HungEngine(url, hangs)) as engine:
        yield engine


def user(content: object) -> list[dict[str, Any]]:
    """Return the messages of a prompt that is one user message."""
    return [{"role": "user", "content": content}]


@asynccontextmanager
async def flowing(
    *hangs: Route, patience: float = 25.0
) -> AsyncGenerator[tuple[HungEngine, Workflow, list[Event]]]:
    """Run an engine and a workflow on it; yield them and the workflow's events."""
    events: list[Event] = []
    async with (
        hung_engine(*hangs) as engine,
        EngineClient(engine.url, timeout=patience) as client,
        Workflow(client, listener=events.append) as flow,
    ):
        yield engine, flow, events


@asynccontextmanager
async def linked(
    engine: HungEngine,
    *segments: str | Slot,
    text: Text | None = None,
    ttl: float = 30.0,
    **more: Any,
) -> AsyncGenerator[Link]:
    """Run a link to a prompt that may follow a text; yield it once its stream is open."""
    settings = EngineSettings(ttl)
    async with (
        EngineClient(engine.url, timeout=25.0, engine_settings=settings) as client,
        anyio.create_task_group() as group,
    ):
        link = Link(client, Prompt(segments), agent="reader", **more)
        group.start_soon(link.run)
        if text is not None:
            text._feed_to(link)
        await engine.until("open")
        yield link
        group.cancel_scope.cancel()
