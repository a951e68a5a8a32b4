"""The shell router's server: one address in front of a PD pair and its own router."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from flashmoa._starlette import while_connected
from flashmoa.engine import EngineClient, EngineError
from flashmoa.router.bodies import TooLarge, json_answer, read_body, refusal, request_object
from flashmoa.router.connections import EngineLost, connections
from flashmoa.router.forwarding import Call, Relay, api_key, forward
from flashmoa.router.logs import hide_streams
from flashmoa.router.paths import CHAT, GENERATE, STREAMS, Repeat
from flashmoa.router.shell.agents import AgentAnswer, AgentFailed, AgentPromptCache, Name
from flashmoa.router.shell.ahead import Ahead
from flashmoa.router.shell.asks import Ask, parsed
from flashmoa.router.shell.counters import ShellCounters
from flashmoa.router.shell.writing import Writing

# The prefill engine's, so that FlashMoA's clients find a PD pair to be one engine.
_PREFILLS = ("/prefill_only", "/render", STREAMS, "/flashmoa", "/tokenize", "/detokenize")
# Any engine answers that to who has the key, and does nothing for it.
_ASKED = "/model_info"
_DELETE_SECONDS = 5.0
_METHODS = ["GET", "POST", "PUT", "DELETE"]


@dataclass(frozen=True, slots=True)
class ShellOptions:
    """How a shell router works.

    Attributes:
        prefill: URL of the prefill engine, with the plugin; ``pd_router``: of the pair's router.
        agent_seconds: how long a request waits for an answer that it reads.
        max_body_bytes: of a request.
    """

    prefill: str
    pd_router: str
    agent_seconds: float = 600.0
    max_body_bytes: int = 32 << 20


def application(options: ShellOptions) -> Starlette:
    """What the PD pair's router has, requests that read agents, prompt streams, ``/metrics``."""
    hide_streams()
    shell = _Shell(options)
    routes = [
        Route(CHAT, shell.asked, methods=["POST"]),
        Route(GENERATE, shell.asked, methods=["POST"]),
        Route("/metrics", shell.metrics),
        Route("/{path:path}", shell.passed, methods=_METHODS),
    ]
    return Starlette(routes=routes, lifespan=shell.lifespan)


class _Shell:
    def __init__(self, options: ShellOptions) -> None:
        self._options = options
        self._cache = AgentPromptCache()
        self._counters = ShellCounters()

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncGenerator[None]:
        async with connections() as self._connections:
            yield

    async def metrics(self, _request: Request) -> Response:
        page = self._counters.page(len(self._cache))
        return Response(page, media_type="text/plain; version=0.0.4")

    async def asked(self, request: Request) -> Response:
        """A request for an answer, which may read agents or write as one."""
        return await self._answer(request, asks=True)

    async def passed(self, request: Request) -> Response:
        """Anything else, as it is."""
        return await self._answer(request, asks=False)

    async def _answer(self, request: Request, asks: bool) -> Response:
        try:
            body = await read_body(request, self._options.max_body_bytes)
            async with while_connected(request):
                call = Call.of(request, body)
                return await (self._ask(call) if asks else self._pass(call))
        except TooLarge as error:
            return refusal(413, str(error))
        except AgentFailed as error:
            return refusal(424, str(error))
        except EngineLost as error:
            return refusal(502, f"the engine is gone: {error}")
        except ValueError as error:
            return refusal(400, str(error))
        except ClientDisconnect:
            pass
        return Response(status_code=499)  # To nobody.

    async def _pass(self, call: Call) -> Response:
        prefills = any(call.path.startswith(path) for path in _PREFILLS)
        target = self._options.prefill if prefills else self._options.pd_router
        return await self._send(call, target, self._hearing(None))

    async def _ask(self, call: Call) -> Response:
        body = request_object(call.body)
        ask = parsed(call.path, body)
        if ask.is_ordinary:
            async with self._stream_of(body, call):
                return await self._send(call, self._options.pd_router, self._hearing(None))
        if (refused := await self._refused(call)) is not None:
            return refused
        names = {agent: self._name(call, ask, agent) for agent in ask.reads}
        answers = {agent: self._cache.read(name) for agent, name in names.items()}
        own = None
        if ask.agent is not None:
            own = self._cache.begin(self._name(call, ask, ask.agent), names.values())
        try:
            await self._read(ask, answers, call)
            return await self._write(ask, answers, own, call)
        except BaseException as error:
            if own is not None and not own.is_over:
                own.fail(AgentFailed(f"{own.name}'s request failed: {error or 'cancelled'}"))
            raise

    async def _refused(self, call: Call) -> Response | None:
        """What the prefill engine answers to a key that it refuses: nobody else may wait here."""
        url, key = self._options.prefill + _ASKED, api_key(call.headers)
        try:
            answer, said = await self._connections.exchange("GET", url, key, b"", Repeat.ALWAYS)
        except EngineLost:
            return None  # The request itself may find it there again.
        answer.close()
        if answer.status not in (401, 403):
            return None
        return Response(said, answer.status, media_type=answer.content_type)

    def _name(self, call: Call, ask: Ask, agent: str) -> Name:
        return Name(api_key(call.headers).get("authorization", ""), ask.workflow, agent)

    async def _read(self, ask: Ask, answers: Mapping[str, AgentAnswer], call: Call) -> None:
        """Wait for the answers, with the prompt prefilled meanwhile. Raises: AgentFailed."""
        if all(answer.is_over for answer in answers.values()) or not ask.can_go_ahead:
            await self._complete(answers)
            return
        problem: AgentFailed | None = None
        async with EngineClient(self._options.prefill, headers=api_key(call.headers)) as engine:
            ahead = Ahead(engine, ask, answers)
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(ahead.run)
                    try:
                        await self._complete(answers)
                    except AgentFailed as error:
                        problem = error  # Not as a group.
                        group.cancel_scope.cancel()
                if problem is not None:
                    raise problem
                if (done := await ahead.settle()) is not None:
                    self._counters.settled(done)
            finally:
                await ahead.give_back()

    async def _complete(self, answers: Mapping[str, AgentAnswer]) -> None:
        with anyio.move_on_after(self._options.agent_seconds) as waiting:
            for answer in answers.values():
                await answer.complete()
        if waiting.cancelled_caught:
            late = ", ".join(agent for agent, one in answers.items() if not one.is_over)
            raise AgentFailed(f"{late} did not write an answer in time")

    async def _write(
        self, ask: Ask, answers: Mapping[str, AgentAnswer], own: AgentAnswer | None, call: Call
    ) -> Response:
        """Send the request, whose prompt is complete. Its answer is heard, if anybody may read."""
        if ask.form == "tokens":
            body = ask.with_tokens({agent: one.token_ids() for agent, one in answers.items()})
        else:
            body = ask.with_texts({agent: one.written for agent, one in answers.items()})
        streams = bool(body.get("stream"))
        # The last event of SGLang's own streams is the answer that would be given without.
        collects = own is not None and not streams and ask.form != "chat"
        if collects:
            body["stream"] = True
        hearing = self._hearing(own, streams or collects)
        sent = replace(call, body=json.dumps(body).encode())
        answer = await self._send(sent, self._options.pd_router, hearing)
        if collects and isinstance(answer, Relay):
            await answer.drain()
            if hearing.ending != "answered" or not hearing.last:
                raise EngineLost("its answer broke off")
            failed = "error" in hearing.last
            return json_answer(hearing.last, 502 if failed else answer.status_code)
        return answer

    def _hearing(self, own: AgentAnswer | None, streams: bool = False) -> Writing:
        return Writing(own, self._counters, streams)

    async def _send(self, call: Call, target: str, hearing: Writing) -> Response:
        async with AsyncExitStack() as stack:
            return await forward(self._connections, call, target, hearing, stack)
        raise AssertionError  # Left by return or raise.

    @asynccontextmanager
    async def _stream_of(self, body: Mapping[str, Any], call: Call) -> AsyncGenerator[None]:
        """A client's own prompt stream has done what it could when its request is sent."""
        stream, key = body.get("prompt_stream_id"), api_key(call.headers)
        try:
            yield
        finally:
            if isinstance(stream, str) and stream.isalnum():
                with anyio.move_on_after(_DELETE_SECONDS, shield=True), suppress(EngineError):
                    async with EngineClient(self._options.prefill, headers=key) as engine:
                        await engine.delete_stream(stream)
