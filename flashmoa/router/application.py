"""The router's server: several engines behind one address."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flashmoa.engine.connections import CONNECTIONS
from flashmoa.router.client_requests import (
    ANYWHERE,
    ROUTED,
    STREAMS,
    ForwardedRequest,
    Handler,
    hide_stream_ids,
    json_answer,
    refusal,
    request_object,
    respond,
)
from flashmoa.router.connections import connections
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.engine_pool import EnginePool, merged_info
from flashmoa.router.engines import EngineMonitor, PrefillPoller, RoutedEngine
from flashmoa.router.errors import EngineLost, NoEngine
from flashmoa.router.forwarding import PlacementObserver, RelayedStream, forward
from flashmoa.router.kv_events import EngineBlocks, KvEventSubscriber
from flashmoa.router.metrics import RouterMetrics
from flashmoa.router.policies import Policy
from flashmoa.router.prefix_aware import PrefixAware
from flashmoa.router.prompts import PromptHasher

_ANY_ENGINE_TELLS = ("/v1/models", "/model_info", "/get_model_info", "/server_info")


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """How a router works.

    Attributes:
        engines: URLs.
        policy: decides where requests go; :class:`PrefixAware` if it is ``None``.
        api_key: for the router's own questions; requests carry their clients' own.
        model_config: the model's ``config.json``, where the path that its engines name cannot be
            read here.
        saturation_margin: kappa of the threshold; with 0 engines take every request.
        tokenize: whether engines are asked for prompts' tokens, which takes milliseconds for each
            new prompt; ``None``: if one of them publishes KV events, which are about tokens.
        max_body_bytes: the largest body of a request.
        max_waiting: the most requests in the queue.
        watch_seconds: between two probes of an engine.
        hung_seconds: until an engine that accepts connections and does not answer counts as gone.
    """

    engines: Sequence[str]
    policy: Policy | None = None
    api_key: str | None = None
    model_config: Mapping[str, Any] | None = None
    saturation_margin: float = 1.2
    tokenize: bool | None = None
    max_body_bytes: int = 32 << 20
    max_waiting: int = 10_000
    watch_seconds: float = 2.0
    hung_seconds: float = 40.0


def application(options: RouterOptions) -> Starlette:
    """Return a server of OpenAI's and SGLang's routes, prompt streams and ``/metrics``."""
    hide_stream_ids()
    router = _Router(options)
    one = f"{STREAMS}/{{id}}"
    routes = [
        *(router.serve(path, router.route, "POST") for path in ROUTED),
        *(router.serve(path, router.to_any, "POST") for path in ANYWHERE),
        *(router.serve(path, router.to_any, "GET") for path in _ANY_ENGINE_TELLS),
        router.serve(STREAMS, router.streams, "GET"),
        router.serve(one, router.to_its_engine, "GET", "DELETE"),
        router.serve(f"{one}/append", router.to_its_engine, "POST"),
        router.serve(f"{one}/keep_alive", router.to_its_engine, "POST"),
        router.serve("/flush_cache", router.flush, "POST"),
        router.serve("/flashmoa/info", router.info, "GET"),
        # These need no API key, as SGLang's own do not.
        Route("/health", router.health),
        Route("/metrics", router.metrics),
    ]
    return Starlette(routes=routes, lifespan=router.lifespan)


class _Router:
    def __init__(self, options: RouterOptions) -> None:
        self._options = options
        policy = options.policy or PrefixAware()
        self._dispatcher = Dispatcher(policy, options.max_waiting)
        self._engines = {url: RoutedEngine(url) for url in options.engines}
        self._metrics = RouterMetrics(self._dispatcher, self._engines.values(), policy)

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncGenerator[None]:
        options, key = self._options, self._options.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(None, connect=10.0)
        async with (
            connections() as self._connections,
            httpx.AsyncClient(timeout=timeout, limits=CONNECTIONS) as http,
            httpx.AsyncClient(timeout=10.0, headers=headers, limits=CONNECTIONS) as probing,
        ):
            self._monitor = EngineMonitor(
                probing,
                self._dispatcher,
                config=options.model_config,
                saturation_margin=options.saturation_margin,
                interval=options.watch_seconds,
                hung_seconds=options.hung_seconds,
            )
            self._prompts = PromptHasher(http, self._tokenizes)
            self._pool = EnginePool(self._connections, self._engines)
            self._pollers = {url: PrefillPoller(probing, url) for url in self._engines}
            async with anyio.create_task_group() as group:
                async with anyio.create_task_group() as first:
                    for engine in self._engines.values():
                        first.start_soon(self._monitor.probe, engine)
                for url, engine in self._engines.items():
                    group.start_soon(self._monitor.run, engine)
                    group.start_soon(self._subscribe, engine)
                    group.start_soon(self._pollers[url].run)
                yield
                group.cancel_scope.cancel()

    def _tokenizes(self) -> bool:
        if self._options.tokenize is None:
            return any(engine.events for engine in self._engines.values())
        return self._options.tokenize

    async def _subscribe(self, engine: RoutedEngine) -> None:
        await engine.described.wait()
        blocks = EngineBlocks(self._dispatcher, engine.url, len(engine.events))
        async with anyio.create_task_group() as group:
            for source in engine.events:
                group.start_soon(KvEventSubscriber(blocks, source).run)

    def serve(self, path: str, handler: Handler, *methods: str) -> Route:
        """Return a route whose handler's errors are answered as the router answers them."""

        async def endpoint(request: Request) -> Response:
            return await respond(request, self._options.max_body_bytes, handler)

        return Route(path, endpoint, methods=list(methods))

    async def route(self, _request: Request, call: ForwardedRequest) -> Response:
        """Send a request with a prompt where the policy says, or where its prompt stream is.

        If that engine is lost before it answers, the request goes to another one.
        """
        body = request_object(call.body)
        reached = False
        if (engine := await self._engine_of_stream(body, call)) is not None:
            try:
                return await self._place(body, call, engine)
            except EngineLost as error:
                # The stream was only a hint: the request has its whole prompt.
                reached = error.reached
        return await self._try_engines(lambda: self._place(body, call), reached)

    async def _try_engines(
        self, send: Callable[[], Awaitable[Response]], reached: bool = False
    ) -> Response:
        """Send a request to other engines while engines are lost.

        At most two of them may have received it: a request that crashes engines must not crash all.
        """
        # Engines that cannot have received it do not count, so every engine may be tried.
        for _ in self._engines:
            try:
                return await send()
            except EngineLost as error:
                if error.reached and reached:
                    raise
                reached |= error.reached
        return await send()

    async def _engine_of_stream(
        self, body: Mapping[str, Any], call: ForwardedRequest
    ) -> str | None:
        stream = body.get("prompt_stream_id")
        if not isinstance(stream, str):
            return None
        try:
            return await self._pool.engine_of(stream, call.api_key)
        except NoEngine:
            return None  # The stream is a hint; the request itself may wait for an engine.

    async def _place(
        self, body: Mapping[str, Any], call: ForwardedRequest, engine: str | None = None
    ) -> Response:
        """Send a request to ``engine``, which has its prompt stream, or where the policy says."""
        async with AsyncExitStack() as stack:
            if engine is not None:
                blocks = self._prompts.known_blocks(body)
                place = stack.enter_context(self._dispatcher.place_at(engine, blocks))
            else:
                blocks = await self._prompts.blocks(body, self._pool.any(), call.api_key)
                place = await stack.enter_async_context(self._dispatcher.place(blocks))
                if not body.get("stream") and not self._engines[place.engine].events:
                    stack.enter_context(self._pollers[place.engine].follow(place))
            self._metrics.sent(place.engine, blocks.length)
            observer = PlacementObserver(self._metrics, place.engine, place)
            answer = await self._forward(call, place.engine, observer, stack)
            if call.path == STREAMS:
                self._pool.stream_opened(answer.body, place.engine)
            return answer
        raise AssertionError  # The context never suppresses an exception.

    async def to_any(self, _request: Request, call: ForwardedRequest) -> Response:
        """Send a request to any engine."""
        return await self._try_engines(lambda: self._send(call, self._pool.any()))

    async def to_its_engine(self, request: Request, call: ForwardedRequest) -> Response:
        """Send a request about a prompt stream to its engine, which checks the client's key."""
        stream = request.path_params["id"]
        engine = await self._pool.engine_of(stream, call.api_key)
        if engine is None:
            code = {"code": "unknown_stream"}
            return refusal(404, f"no engine has a prompt stream {stream!r}; open it again", code)
        answer = await self._send(call, engine)
        if request.method == "DELETE" and answer.status_code == 200:
            self._pool.forget_stream(stream)
        return answer

    async def _send(self, call: ForwardedRequest, engine: str) -> Response:
        async with AsyncExitStack() as stack:
            observer = PlacementObserver(self._metrics, engine)
            return await self._forward(call, engine, observer, stack)
        raise AssertionError  # The context never suppresses an exception.

    async def _forward(
        self,
        call: ForwardedRequest,
        engine: str,
        observer: PlacementObserver,
        stack: AsyncExitStack,
    ) -> Response:
        try:
            until_hung = self._engines[engine].until_hung
            with until_hung():
                answer = await forward(self._connections, call, engine, observer, stack)
                if isinstance(answer, RelayedStream):
                    answer.until_hung = until_hung
                return answer
            observer.ended("lost")
            raise EngineLost(f"{engine} hangs")
        except EngineLost:
            # Perhaps only this connection is broken.
            await self._monitor.recheck(self._engines[engine])
            self._prompts.forget(engine)
            raise

    async def streams(self, _request: Request, call: ForwardedRequest) -> Response:
        """Answer how many prompt streams are open."""
        return json_answer({"open": await self._pool.open_streams(call.api_key)})

    async def flush(self, _request: Request, call: ForwardedRequest) -> Response:
        """Empty every engine's cache."""
        replies = await self._pool.ask("POST", call.target, call.api_key)
        for engine, reply in replies.items():
            if reply.is_success:
                self._dispatcher.cleared(engine)
        worst = max(replies.values(), key=lambda one: one.status)
        return Response(worst.content, worst.status, media_type=worst.media_type)

    async def info(self, _request: Request, call: ForwardedRequest) -> Response:
        """Answer what all engines can do, as one engine would, and the router's own state."""
        replies = await self._pool.successes("GET", "/flashmoa/info", call.api_key)
        engines = [
            {"url": one.url, "is_up": one.is_up, "unit": one.unit, "saturation": one.saturation}
            for one in self._engines.values()
        ]
        state = {"engines": engines, "waiting": self._dispatcher.waiting}
        return json_answer({**merged_info([one.object() for one in replies]), "router": state})

    async def health(self, _request: Request) -> Response:
        return Response(status_code=200 if self._dispatcher.engines else 503)

    async def metrics(self, _request: Request) -> Response:
        return Response(self._metrics.page(), media_type="text/plain; version=0.0.4")
