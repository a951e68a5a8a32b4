"""Serve several engines at one address (`application`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flashmoa.router.client_requests import (
    ANY_ENGINE_ROUTES,
    POLICY_ROUTES,
    STREAMS,
    ForwardedRequest,
    Handler,
    hide_stream_ids,
    make_application,
    make_endpoint,
    make_error_response,
    make_json_response,
    parse_object,
)
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.engines import (
    EnginePool,
    RoutedEngine,
    RouterOptions,
    merge_info,
    split_place,
)
from flashmoa.router.errors import AllEnginesRefused, EngineLost, NoEngine
from flashmoa.router.forwarding import forward, open_connections
from flashmoa.router.kv_events import follow_events
from flashmoa.router.metrics import PlacementObserver, RouterMetrics
from flashmoa.router.policy import PrefixAware
from flashmoa.router.prompts import PromptHasher

# An engine that shuts down finishes requests, and even takes new ones, but answers these with 503.
_REFUSED_WHILE_DRAINING = (STREAMS, "/prefill_only")
_MODEL_INFO_ROUTES = ("/v1/models", "/model_info", "/get_model_info", "/server_info")


def application(options: RouterOptions) -> Starlette:
    """Return a server of OpenAI's and SGLang's routes, prompt streams and ``/metrics``."""
    hide_stream_ids()
    router = _Router(options)

    def route(path: str, handler: Handler, *methods: str) -> Route:
        return Route(path, make_endpoint(handler, options.max_body_bytes), methods=list(methods))

    stream = f"{STREAMS}/{{id}}"
    routes = [
        *(route(path, router.send_by_policy, "POST") for path in POLICY_ROUTES),
        *(route(path, router.send_to_any, "POST") for path in ANY_ENGINE_ROUTES),
        *(route(path, router.send_to_any, "GET") for path in _MODEL_INFO_ROUTES),
        route(stream, router.send_to_stream, "GET", "DELETE"),
        route(f"{stream}/append", router.send_to_stream, "POST"),
        route(f"{stream}/keep_alive", router.send_to_stream, "POST"),
        route("/flush_cache", router.flush_caches, "POST"),
        route("/flashmoa/info", router.describe, "GET"),
        # These need no API key, as SGLang's do not.
        Route("/health", router.health),
        Route("/metrics", router.metrics),
    ]
    return make_application(routes, router.lifespan)


class _Router:
    def __init__(self, options: RouterOptions) -> None:
        self._options = options
        self._dispatcher = Dispatcher(options.policy or PrefixAware(), options.max_waiting)
        self._metrics = RouterMetrics(self._dispatcher)

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncGenerator[None]:
        """Probe and follow the engines while the server runs."""
        async with (
            open_connections() as self._connections,
            anyio.create_task_group() as group,
        ):
            followers: dict[str, anyio.CancelScope] = {}

            def follow(engine: RoutedEngine) -> None:
                # One that has restarted may publish elsewhere, and has another cache.
                if (old := followers.get(engine.url)) is not None:
                    old.cancel()
                scope = followers[engine.url] = anyio.CancelScope()
                group.start_soon(
                    follow_events, self._dispatcher, engine.places, engine.events, scope
                )

            self._pool = EnginePool(self._connections, self._dispatcher, self._options, follow)
            engines = self._engines = self._pool.engines
            # KV events contain tokens. To ask for these takes milliseconds for each new prompt.
            self._prompts = PromptHasher(
                self._connections, lambda: any(engine.events for engine in engines.values())
            )
            # The server accepts requests only after every engine was probed.
            async with anyio.create_task_group() as first_probes:
                for engine in self._engines.values():
                    first_probes.start_soon(self._pool.probe, engine)
            for engine in self._engines.values():
                group.start_soon(self._pool.watch, engine)
            yield
            group.cancel_scope.cancel()

    async def send_by_policy(self, call: ForwardedRequest) -> Response:
        """Send a request with a prompt to the engine that has its prompt stream, if it has one.

        Otherwise, or if that engine is lost before it answers, the policy chooses the engine. A
        prompt stream is only a hint, because the request contains its whole prompt.
        """
        body = parse_object(call.body)
        stream_place = None
        if isinstance(stream := body.get("prompt_stream_id"), str):
            with suppress(NoEngine):  # The request itself may wait for an engine.
                stream_place = await self._pool.place_of_stream(stream, call.api_key)

        async def send() -> Response:
            nonlocal stream_place
            place, stream_place = stream_place, None
            return await self._place(body, call, place)

        return await self._try_engines(send)

    async def send_to_any(self, call: ForwardedRequest) -> Response:
        return await self._try_engines(lambda: self._send(call, self._pool.next_engine()))

    async def _try_engines(self, send: Callable[[], Awaitable[Response]]) -> Response:
        """Call ``send``, which chooses an engine, again while engines are lost.

        At most two engines may have received the request, because a request that crashes engines
        must not crash all of them. Engines that certainly did not receive it do not count.
        """
        reached = False
        for _ in self._engines:
            try:
                return await send()
            except EngineLost as error:
                if error.reached and reached:
                    raise
                reached |= error.reached
        return await send()

    async def _place(
        self, body: Mapping[str, Any], call: ForwardedRequest, place: str | None
    ) -> Response:
        """Send a request to ``place``, which has its prompt stream, or as the policy decides."""
        async with AsyncExitStack() as stack:
            if place is not None:
                blocks = self._prompts.known_blocks(body)
                placement = stack.enter_context(self._dispatcher.place_at(place, blocks))
            else:
                blocks = await self._prompts.blocks(body, self._pool.next_engine(), call.api_key)
                placement = await stack.enter_async_context(self._dispatcher.place(blocks))
            self._metrics.prompt_tokens.labels(placement.engine).inc(blocks.length)
            observer = PlacementObserver(self._metrics, placement.engine, placement)
            answer = await self._send(call, placement.engine, observer, stack.pop_all())
        if call.path in _REFUSED_WHILE_DRAINING and answer.status_code == 503:
            engine = self._engines[split_place(placement.engine)[0]]
            await self._pool.recheck(engine)
            if not engine.is_up:
                raise EngineLost(f"{placement.engine}: it is shutting down", reached=False)
        if call.path == STREAMS:
            self._pool.remember_stream(parse_object(answer.body).get("id"), placement.engine)
        return answer

    async def _send(
        self,
        call: ForwardedRequest,
        place: str,
        observer: PlacementObserver | None = None,
        stack: AsyncExitStack | None = None,
    ) -> Response:
        """Forward a request to an engine; ``stack`` is closed when the answer has ended.

        Raises: EngineLost if the engine does not answer.
        """
        url, rank = split_place(place)
        observer = observer or PlacementObserver(self._metrics, place)
        async with stack or AsyncExitStack() as stack:
            try:
                return await forward(self._connections, call.on_rank(rank), url, observer, stack)
            except EngineLost:
                # The engine may still answer, if only this connection has broken.
                await self._pool.recheck(self._engines[url])
                raise

    async def send_to_stream(self, call: ForwardedRequest) -> Response:
        """Send a request about a prompt stream to its engine, which checks the client's key."""
        stream = call.path.split("/")[2]
        place = await self._pool.place_of_stream(stream, call.api_key)
        if place is None:
            message = f"no engine has a prompt stream {stream!r}; open a new one"
            return make_error_response(404, message, "unknown_stream")
        answer = await self._send(call, place)
        if call.method == "DELETE" and answer.status_code == 200:
            self._pool.forget_stream(stream)
        return answer

    async def flush_caches(self, call: ForwardedRequest) -> Response:
        replies = await self._pool.ask_all("POST", call.target, call.api_key)
        for engine, reply in replies.items():
            for place in self._engines[engine].places if reply.status_code == 200 else ():
                self._dispatcher.policy.clear_blocks(place)
        return max(replies.values(), key=lambda reply: reply.status_code)

    async def describe(self, call: ForwardedRequest) -> Response:
        replies = list((await self._pool.ask_all("GET", call.target, call.api_key)).values())
        if not any(reply.status_code == 200 for reply in replies):
            raise AllEnginesRefused(replies[0])
        # Engines without the plugin answer 404.
        infos = [
            parse_object(reply.body) if reply.status_code == 200 else {}
            for reply in replies
            if reply.status_code in (200, 404)
        ]
        return make_json_response(merge_info(infos))

    async def health(self, _request: Request) -> Response:
        return Response(status_code=200 if self._dispatcher.engines else 503)

    async def metrics(self, _request: Request) -> Response:
        page = self._metrics.page({url: engine.is_up for url, engine in self._engines.items()})
        return Response(page, media_type="text/plain; version=0.0.4")
