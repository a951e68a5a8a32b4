"""The router's server: engines behind one address."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from flashmoa._starlette import while_connected
from flashmoa.engine.connections import CONNECTIONS
from flashmoa.router.blocks import Blocks
from flashmoa.router.bodies import (
    BadBody,
    TooLarge,
    json_answer,
    read_body,
    refusal,
    request_object,
)
from flashmoa.router.connections import EngineLost, connections
from flashmoa.router.counters import Counters
from flashmoa.router.dispatcher import Dispatcher, NoEngine, Place, QueueFull
from flashmoa.router.engines import Engine, Watch
from flashmoa.router.fleet import Fleet, Refused, merged
from flashmoa.router.forwarding import Call, Relay, Tally, api_key, forward
from flashmoa.router.logs import hide_streams
from flashmoa.router.options import RouterOptions
from flashmoa.router.paths import ANYWHERE, ROUTED, STREAMS
from flashmoa.router.prefix_aware import PrefixAware
from flashmoa.router.progress import Progress
from flashmoa.router.prompts import Prompts

_ASKED = ("/v1/models", "/model_info", "/get_model_info", "/server_info")


def application(options: RouterOptions) -> Starlette:
    """OpenAI's and SGLang's routes and prompt streams over all engines, and ``/metrics``."""
    hide_streams()
    router = _Router(options)
    one = f"{STREAMS}/{{id}}"
    routes = [
        *(router.serve(path, router.route, "POST") for path in ROUTED),
        *(router.serve(path, router.to_any, "POST") for path in ANYWHERE),
        *(router.serve(path, router.to_any, "GET") for path in _ASKED),
        router.serve(STREAMS, router.streams, "GET"),
        router.serve(one, router.to_its_engine, "GET", "DELETE"),
        router.serve(f"{one}/append", router.to_its_engine, "POST"),
        router.serve(f"{one}/keep_alive", router.to_its_engine, "POST"),
        router.serve("/flush_cache", router.flush, "POST"),
        router.serve("/flashmoa/info", router.info, "GET"),
        # As SGLang's own, these need no API key.
        Route("/health", router.health),
        Route("/metrics", router.metrics),
    ]
    return Starlette(routes=routes, lifespan=router.lifespan)


_How = Callable[[Request, Call], Awaitable[Response]]


class _Router:
    def __init__(self, options: RouterOptions) -> None:
        self._options = options
        policy = options.policy or PrefixAware()
        self._dispatcher = Dispatcher(policy, options.max_waiting)
        self._engines = {url: Engine(url) for url in options.engines}
        self._counters = Counters(self._dispatcher, self._engines.values(), policy)

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncGenerator[None]:
        options, key = self._options, self._options.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(None, connect=10.0)
        async with (
            connections() as self._connections,
            httpx.AsyncClient(timeout=timeout, limits=CONNECTIONS) as http,
            httpx.AsyncClient(timeout=10.0, headers=headers, limits=CONNECTIONS) as asking,
        ):
            self._watch = Watch(
                asking,
                self._dispatcher,
                config=options.model_config,
                saturation_margin=options.saturation_margin,
                every=options.watch_seconds,
                hung_seconds=options.hung_seconds,
            )
            self._prompts = Prompts(http, self._tokenizes)
            self._fleet = Fleet(self._connections, self._engines)
            self._progress = {url: Progress(asking, url) for url in self._engines}
            async with anyio.create_task_group() as group:
                async with anyio.create_task_group() as first:
                    for engine in self._engines.values():
                        first.start_soon(self._watch.look, engine)
                for url, engine in self._engines.items():
                    group.start_soon(self._watch.run, engine)
                    group.start_soon(self._subscribe, engine)
                    group.start_soon(self._progress[url].run)
                yield
                group.cancel_scope.cancel()

    def _tokenizes(self) -> bool:
        if self._options.tokenize is None:
            return any(engine.events for engine in self._engines.values())
        return self._options.tokenize

    async def _subscribe(self, engine: Engine) -> None:
        await engine.known.wait()
        if not engine.events:
            return
        from flashmoa.router.subscriber import EngineBlocks, Subscriber

        blocks = EngineBlocks(self._dispatcher, engine.url, len(engine.events))
        async with anyio.create_task_group() as group:
            for source in engine.events:
                group.start_soon(Subscriber(blocks, source).run)

    def serve(self, path: str, how: _How, *methods: str) -> Route:
        """A route, and what is answered where an engine does not."""

        async def answered(request: Request) -> Response:
            return await self._answer(request, how)

        return Route(path, answered, methods=list(methods))

    async def _answer(self, request: Request, how: _How) -> Response:
        try:
            body = await read_body(request, self._options.max_body_bytes)
            async with while_connected(request):
                call = Call.of(request, body)
                return await how(request, call)
        except BadBody as error:
            return refusal(400, str(error))
        except TooLarge as error:
            return refusal(413, str(error))
        except QueueFull:
            return refusal(429, "too many requests wait already; try again later")
        except NoEngine:
            return refusal(503, "no engine answers; they are asked again every few seconds")
        except EngineLost as error:
            return refusal(502, f"the engine is gone: {error}")
        except Refused as error:
            told = error.told
            return Response(told.content, told.status, media_type=told.form)
        except ClientDisconnect:
            pass
        return Response(status_code=499)  # To nobody.

    async def route(self, _request: Request, call: Call) -> Response:
        """A request with a prompt, or the first piece of a prompt stream: all of it stays there.

        Where the policy says; elsewhere if that engine is lost before it answers.
        """
        body = request_object(call.body)
        reached = False
        if (at := await self._engine_of_stream(body, call)) is not None:
            try:
                return await self._place_at(at, body, call)
            except EngineLost as error:
                # The stream was a hint; the request has its whole prompt.
                reached = error.reached
        return await self._again(lambda: self._place(body, call), reached)

    async def _again(
        self, send: Callable[[], Awaitable[Response]], reached: bool = False
    ) -> Response:
        """Twice to engines that may get it: one that ends engines must not end all of them."""
        # Engines that are gone do not count; there are only so many.
        for _ in self._engines:
            try:
                return await send()
            except EngineLost as error:
                if error.reached and reached:
                    raise
                reached |= error.reached
        return await send()

    async def _engine_of_stream(self, body: Mapping[str, Any], call: Call) -> str | None:
        stream = body.get("prompt_stream_id")
        if not isinstance(stream, str):
            return None
        try:
            return await self._fleet.find(stream, api_key(call.headers))
        except NoEngine:
            return None  # It is a hint; the request itself may wait for one.

    async def _place(self, body: Mapping[str, Any], call: Call) -> Response:
        blocks = await self._prompts.blocks(body, self._fleet.any(), api_key(call.headers))
        async with AsyncExitStack() as stack:
            place = await stack.enter_async_context(self._dispatcher.place(blocks))
            if not body.get("stream") and not self._engines[place.engine].events:
                stack.enter_context(self._progress[place.engine].follow(place))
            answer = await self._placed(place, blocks, call, stack)
            if call.path == STREAMS:
                self._fleet.opened(answer.body, place.engine)
            return answer
        raise AssertionError  # Left by return or raise.

    async def _place_at(self, engine: str, body: Mapping[str, Any], call: Call) -> Response:
        """On the engine that has its prompt stream."""
        blocks = self._prompts.at_once(body)
        async with AsyncExitStack() as stack:
            place = stack.enter_context(self._dispatcher.place_at(engine, blocks))
            return await self._placed(place, blocks, call, stack)
        raise AssertionError  # Left by return or raise.

    async def _placed(
        self, place: Place, blocks: Blocks, call: Call, stack: AsyncExitStack
    ) -> Response:
        self._counters.sent(place.engine, blocks.length)
        tally = Tally(self._counters, place.engine, place)
        return await self._forwarded(call, place.engine, tally, stack)

    async def to_any(self, _request: Request, call: Call) -> Response:
        """Any engine can answer it."""
        return await self._again(lambda: self._send(call, self._fleet.any()))

    async def to_its_engine(self, request: Request, call: Call) -> Response:
        """The engine that has a prompt stream, and sees the client's key, whoever finds it."""
        stream = request.path_params["id"]
        engine = await self._fleet.find(stream, api_key(call.headers))
        if engine is None:
            code = {"code": "unknown_stream"}
            return refusal(404, f"no engine has a prompt stream {stream!r}", code)
        answer = await self._send(call, engine)
        if request.method == "DELETE" and answer.status_code == 200:
            self._fleet.forget(stream)
        return answer

    async def _send(self, call: Call, engine: str) -> Response:
        async with AsyncExitStack() as stack:
            return await self._forwarded(call, engine, Tally(self._counters, engine), stack)
        raise AssertionError  # Left by return or raise.

    async def _forwarded(
        self, call: Call, engine: str, tally: Tally, stack: AsyncExitStack
    ) -> Response:
        try:
            attended = self._engines[engine].attended
            with attended():
                answer = await forward(self._connections, call, engine, tally, stack)
                if isinstance(answer, Relay):
                    answer.attended = attended
                return answer
            tally.ended("lost")
            raise EngineLost(f"{engine} hangs")
        except EngineLost:
            # Perhaps it was only this connection.
            await self._watch.doubt(self._engines[engine])
            self._prompts.forget(engine)
            raise

    async def streams(self, _request: Request, call: Call) -> Response:
        """How many prompt streams are open."""
        return json_answer({"open": await self._fleet.open_streams(api_key(call.headers))})

    async def flush(self, _request: Request, call: Call) -> Response:
        """Every engine's cache."""
        answers = await self._fleet.ask("POST", call.target, api_key(call.headers))
        for engine, answer in answers.items():
            if answer.is_success:
                self._dispatcher.cleared(engine)
        worst = max(answers.values(), key=lambda one: one.status)
        return Response(worst.content, worst.status, media_type=worst.form)

    async def info(self, _request: Request, call: Call) -> Response:
        """What all engines can do, as one."""
        answers = await self._fleet.agreed("GET", "/flashmoa/info", api_key(call.headers))
        told = merged([one.object() for one in answers])
        return json_answer({**told, "router": self._state()})

    def _state(self) -> dict[str, Any]:
        engines = [
            {"url": one.url, "is_up": one.is_up, "unit": one.unit, "saturation": one.saturation}
            for one in self._engines.values()
        ]
        return {"engines": engines, "waiting": self._dispatcher.waiting}

    async def health(self, _request: Request) -> Response:
        return Response(status_code=200 if self._dispatcher.engines else 503)

    async def metrics(self, _request: Request) -> Response:
        return Response(self._counters.page(), media_type="text/plain; version=0.0.4")
