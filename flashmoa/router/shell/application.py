"""The shell router's server: one address in front of a PD pair and its own router."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flashmoa.engine import EngineClient, EngineError
from flashmoa.router.client_requests import (
    CHAT,
    GENERATE,
    STREAMS,
    ForwardedRequest,
    Repeat,
    hide_stream_ids,
    json_answer,
    request_object,
    respond,
)
from flashmoa.router.connections import connections
from flashmoa.router.errors import AgentFailed, BadRequest, EngineLost
from flashmoa.router.forwarding import RelayedStream, forward
from flashmoa.router.metrics import ShellMetrics
from flashmoa.router.shell.agent_answers import (
    AgentKey,
    AgentPromptCache,
    AnswerRecorder,
    GrowingAnswer,
)
from flashmoa.router.shell.agent_requests import AgentRequest, parse_request
from flashmoa.router.shell.early_prefill import EarlyPrefill

# The prefill engine answers these, so that FlashMoA's clients take a PD pair for one engine.
_PREFILL_ROUTES = ("/prefill_only", "/render", STREAMS, "/flashmoa", "/tokenize", "/detokenize")
# An engine answers this to any client with the right key, and does no work for it.
_KEY_CHECK = "/model_info"
_DELETE_SECONDS = 5.0
_METHODS = ["GET", "POST", "PUT", "DELETE"]


@dataclass(frozen=True, slots=True)
class ShellOptions:
    """How a shell router works.

    Attributes:
        prefill: URL of the prefill engine, which has the plugin.
        pd_router: URL of the pair's own router.
        agent_seconds: how long a request waits for an answer that it reads.
        max_body_bytes: the largest body of a request.
    """

    prefill: str
    pd_router: str
    agent_seconds: float = 600.0
    max_body_bytes: int = 32 << 20


def shell_application(options: ShellOptions) -> Starlette:
    """Return a server of the PD router's routes, agents' requests, prompt streams and metrics."""
    hide_stream_ids()
    shell = _Shell(options)
    routes = [
        Route(CHAT, shell.prompts, methods=["POST"]),
        Route(GENERATE, shell.prompts, methods=["POST"]),
        Route("/metrics", shell.metrics),
        Route("/{path:path}", shell.others, methods=_METHODS),
    ]
    return Starlette(routes=routes, lifespan=shell.lifespan)


class _Shell:
    def __init__(self, options: ShellOptions) -> None:
        self._options = options
        self._cache = AgentPromptCache()
        self._metrics = ShellMetrics()

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncGenerator[None]:
        async with connections() as self._connections:
            yield

    async def metrics(self, _request: Request) -> Response:
        page = self._metrics.page(len(self._cache))
        return Response(page, media_type="text/plain; version=0.0.4")

    async def prompts(self, request: Request) -> Response:
        """Answer a request with a prompt, which may read agents or write as one."""
        return await self._respond(request, self._answer)

    async def others(self, request: Request) -> Response:
        """Pass any other request on as it is."""
        return await self._respond(request, self._pass_on)

    async def _respond(
        self, request: Request, handler: Callable[[ForwardedRequest], Awaitable[Response]]
    ) -> Response:
        async def checked(_request: Request, call: ForwardedRequest) -> Response:
            try:
                return await handler(call)
            except ValueError as error:
                raise BadRequest(str(error)) from error

        return await respond(request, self._options.max_body_bytes, checked)

    async def _pass_on(self, call: ForwardedRequest) -> Response:
        prefills = any(call.path.startswith(path) for path in _PREFILL_ROUTES)
        target = self._options.prefill if prefills else self._options.pd_router
        return await self._send(call, target, self._recorder(None))

    async def _answer(self, call: ForwardedRequest) -> Response:
        body = request_object(call.body)
        request = parse_request(call.path, body)
        if request.is_ordinary:
            async with self._stream_of(body, call):
                return await self._send(call, self._options.pd_router, self._recorder(None))
        if (refused := await self._refused_key(call)) is not None:
            return refused
        client = call.api_key.get("authorization", "")
        keys = {agent: AgentKey(client, request.workflow, agent) for agent in request.reads}
        answers = {agent: self._cache.read(key) for agent, key in keys.items()}
        own = None
        if request.agent is not None:
            own_key = AgentKey(client, request.workflow, request.agent)
            own = self._cache.begin(own_key, keys.values())
        try:
            await self._read(request, answers, call)
            return await self._write(request, answers, own, call)
        except BaseException as error:
            if own is not None and not own.is_over:
                own.fail(AgentFailed(f"{own.name}'s request failed: {error or 'cancelled'}"))
            raise

    async def _refused_key(self, call: ForwardedRequest) -> Response | None:
        """Return the prefill engine's answer if it refuses the client's key.

        A client without a key that the engine accepts must not wait here.
        """
        url = self._options.prefill + _KEY_CHECK
        try:
            answer, content = await self._connections.exchange(
                "GET", url, call.api_key, b"", Repeat.ALWAYS
            )
        except EngineLost:
            return None  # The engine may be there again when the request itself is sent.
        answer.close()
        if answer.status not in (401, 403):
            return None
        return Response(content, answer.status, media_type=answer.content_type)

    async def _read(
        self, request: AgentRequest, answers: Mapping[str, GrowingAnswer], call: ForwardedRequest
    ) -> None:
        """Wait for the answers while the prompt is prefilled. Raises: AgentFailed."""
        if all(answer.is_over for answer in answers.values()) or not request.can_prefill_early:
            await self._complete(answers)
            return
        problem: AgentFailed | None = None
        async with EngineClient(self._options.prefill, headers=call.api_key) as engine:
            early = EarlyPrefill(engine, request, answers)
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(early.run)
                    try:
                        await self._complete(answers)
                    except AgentFailed as error:
                        problem = error  # The task group would raise it within a group.
                        group.cancel_scope.cancel()
                if problem is not None:
                    raise problem
                if (done := await early.finish()) is not None:
                    self._metrics.prompt_completed(done)
            finally:
                await early.release()

    async def _complete(self, answers: Mapping[str, GrowingAnswer]) -> None:
        with anyio.move_on_after(self._options.agent_seconds) as waiting:
            for answer in answers.values():
                await answer.complete()
        if waiting.cancelled_caught:
            late = ", ".join(agent for agent, one in answers.items() if not one.is_over)
            raise AgentFailed(
                f"{late} did not write an answer within {self._options.agent_seconds:g} s"
            )

    async def _write(
        self,
        request: AgentRequest,
        answers: Mapping[str, GrowingAnswer],
        own: GrowingAnswer | None,
        call: ForwardedRequest,
    ) -> Response:
        """Send the request, whose prompt is complete; record its answer if agents may read it."""
        if request.form == "tokens":
            body = request.with_tokens({agent: one.token_ids() for agent, one in answers.items()})
        else:
            body = request.with_texts({agent: one.written for agent, one in answers.items()})
        streams = bool(body.get("stream"))
        # The last event of a stream of SGLang's own /generate is the answer without streaming.
        collects = own is not None and not streams and request.form != "chat"
        if collects:
            body["stream"] = True
        recorder = self._recorder(own, streams or collects)
        sent = replace(call, body=json.dumps(body).encode())
        answer = await self._send(sent, self._options.pd_router, recorder)
        if collects and isinstance(answer, RelayedStream):
            await answer.drain()
            if recorder.ending != "answered" or not recorder.last:
                raise EngineLost("its answer broke off")
            failed = "error" in recorder.last
            return json_answer(recorder.last, 502 if failed else answer.status_code)
        return answer

    def _recorder(self, own: GrowingAnswer | None, streams: bool = False) -> AnswerRecorder:
        return AnswerRecorder(own, self._metrics, streams)

    async def _send(
        self, call: ForwardedRequest, target: str, recorder: AnswerRecorder
    ) -> Response:
        async with AsyncExitStack() as stack:
            return await forward(self._connections, call, target, recorder, stack)
        raise AssertionError  # The context never suppresses an exception.

    @asynccontextmanager
    async def _stream_of(
        self, body: Mapping[str, Any], call: ForwardedRequest
    ) -> AsyncGenerator[None]:
        """Delete a client's own prompt stream once its request is sent and needs it no longer."""
        stream = body.get("prompt_stream_id")
        try:
            yield
        finally:
            if isinstance(stream, str) and stream.isalnum():
                with anyio.move_on_after(_DELETE_SECONDS, shield=True), suppress(EngineError):
                    async with EngineClient(self._options.prefill, headers=call.api_key) as engine:
                        await engine.delete_stream(stream)
