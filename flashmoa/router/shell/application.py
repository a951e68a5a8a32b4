"""Serve a PD pair and its own router at one address (`shell_application`), or several pairs.

Prompts are prefilled while agents write answers in them (`EarlyPrefill`; Faster-MoA §4.3).
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace

import anyio
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from flashmoa._concurrency import all_of
from flashmoa.engine import EngineClient, EngineSettings, Prefilled, prompt_fields
from flashmoa.errors import EngineError
from flashmoa.linking.link import Link, kind_of
from flashmoa.linking.prompt import Placeholders, Prompt
from flashmoa.linking.prompt_feed import level_once
from flashmoa.router.client_requests import (
    CHAT,
    GENERATE,
    STREAMS,
    ForwardedRequest,
    hide_stream_ids,
    make_application,
    make_endpoint,
    make_json_response,
    parse_object,
)
from flashmoa.router.errors import AgentFailed, EngineLost
from flashmoa.router.forwarding import RelayedStream, forward, open_connections
from flashmoa.router.shell.agent_answers import (
    AgentKey,
    AgentPromptCache,
    AnswerRecorder,
    ReadableAnswer,
)
from flashmoa.router.shell.agent_requests import AgentRequest, parse_request

logger = logging.getLogger(__name__)

# The prefill engine answers these, so that FlashMoA's clients can use a PD pair like one engine.
_PREFILL_ROUTES = ("/prefill_only", "/render", STREAMS, "/flashmoa", "/tokenize", "/detokenize")
# An engine answers this at once to any client with the right API key.
_KEY_CHECK = "/model_info"
_CHECK_SECONDS = 60.0
_DELETE_SECONDS = 5.0
_METHODS = ["GET", "POST", "PUT", "DELETE"]


@dataclass(frozen=True, slots=True)
class ShellOptions:
    """Configures the shell router of one pair.

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


def shell_application(options: ShellOptions, answers: AgentPromptCache | None = None) -> Starlette:
    """Return a server of the PD router's routes, agents' requests, prompt streams and metrics.

    Args:
        answers: the answers that it shares with the shell routers of other pairs.
    """
    hide_stream_ids()
    shell = _Shell(options, AgentPromptCache() if answers is None else answers)
    answer = make_endpoint(shell.answer, options.max_body_bytes)
    pass_on = make_endpoint(shell.pass_on, options.max_body_bytes)
    routes = [
        Route(CHAT, answer, methods=["POST"]),
        Route(GENERATE, answer, methods=["POST"]),
        Route("/metrics", shell.metrics),
        Route("/{path:path}", pass_on, methods=_METHODS),
    ]
    return make_application(routes, shell.lifespan)


def shells_application(pairs: Sequence[ShellOptions], first_port: int) -> Starlette:
    """Return a server of several pairs, each with a port of its own, which share agents' answers.

    Because all of them are one process, an answer of one pair is read by the others as by its own,
    and agents that would wait for each other are found wherever they are.

    Args:
        first_port: local port of the first pair; the others have those that follow.
    """
    answers = AgentPromptCache()
    shells = [shell_application(options, answers) for options in pairs]

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            for shell in shells:
                await stack.enter_async_context(shell.router.lifespan_context(shell))
            yield

    async def choose_by_port(scope: Scope, receive: Receive, send: Send) -> None:
        await shells[scope["server"][1] - first_port](scope, receive, send)

    return Starlette(routes=[Mount("/", choose_by_port)], lifespan=lifespan)


class _Shell:
    def __init__(self, options: ShellOptions, answers: AgentPromptCache) -> None:
        self._options = options
        self._cache = answers
        registry = self._registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"flashmoa_shell_{name}", about, labels, registry=registry)

        self._endings = counter("requests", "Requests by ending", "ending")
        self._ahead_tokens = counter(
            "ahead_tokens", "Prompt tokens that were cached when their last answer was complete"
        )
        self._late_tokens = counter(
            "late_tokens", "Prompt tokens computed after that, before the request was sent"
        )
        agents = Gauge(
            "flashmoa_shell_agents", "Answers in the agent prompt cache", registry=registry
        )
        agents.set_function(lambda: len(answers))

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncGenerator[None]:
        async with open_connections() as self._connections:
            yield

    async def metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4")

    async def pass_on(self, call: ForwardedRequest) -> Response:
        is_for_prefill = call.path.startswith(_PREFILL_ROUTES)
        target = self._options.prefill if is_for_prefill else self._options.pd_router
        return await self._send(call, target, AnswerRecorder(None, self._endings))

    async def answer(self, call: ForwardedRequest) -> Response:
        """Answer a request with a prompt, which may read agents' answers or write one."""
        request = parse_request(call.path, body := parse_object(call.body))
        if request.is_ordinary:
            try:
                return await self.pass_on(call)
            finally:
                await self._delete_stream(body.get("prompt_stream_id"), call)
        if (refusal := await self._check_key(call)) is not None:
            return refusal
        client = call.api_key.get("authorization", "")
        keys = {agent: AgentKey(client, request.workflow, agent) for agent in request.marks}
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

    async def _check_key(self, call: ForwardedRequest) -> Response | None:
        """Return the prefill engine's answer if it refuses the client's API key.

        A client whose key it refuses must not wait here for answers.
        """
        url = self._options.prefill + _KEY_CHECK
        with suppress(EngineLost):  # The engine may answer again when the request itself is sent.
            answer = await self._connections.ask("GET", url, call.api_key, seconds=_CHECK_SECONDS)
            if answer is not None and answer.status_code in (401, 403):
                return answer
        return None

    async def _read(
        self, request: AgentRequest, answers: Mapping[str, ReadableAnswer], call: ForwardedRequest
    ) -> None:
        """Wait until all answers are complete, and prefill the prompt in the meantime.

        Raises: AgentFailed if an answer fails or does not arrive in time.
        """
        if all(answer.is_over for answer in answers.values()) or not request.can_prefill_early:
            await self._complete(answers)
            return
        async with EngineClient(
            self._options.prefill,
            headers=call.api_key,
            engine_settings=EngineSettings(without_plugin="off"),
        ) as engine:
            early = EarlyPrefill(engine, request, answers)

            async def complete() -> None:
                await self._complete(answers)
                if (prefilled := await early.finish()) is not None:
                    self._ahead_tokens.inc(prefilled.cached_tokens)
                    self._late_tokens.inc(prefilled.prefilled_tokens)

            await all_of([early.run, complete])

    async def _complete(self, answers: Mapping[str, ReadableAnswer]) -> None:
        with anyio.move_on_after(self._options.agent_seconds) as waiting:
            for answer in answers.values():
                await answer.complete()
        if waiting.cancelled_caught:
            late = ", ".join(agent for agent, answer in answers.items() if not answer.is_over)
            raise AgentFailed(
                f"{late} did not write an answer in time ({self._options.agent_seconds:g} s); ask "
                "it earlier, or start the router with a larger --agent-seconds"
            )

    async def _write(
        self,
        request: AgentRequest,
        answers: Mapping[str, ReadableAnswer],
        own: ReadableAnswer | None,
        call: ForwardedRequest,
    ) -> Response:
        """Send a request whose prompt is complete; record its answer if agents may read it."""
        body = request.filled({agent: answer.written for agent, answer in answers.items()})
        streams = bool(body.get("stream"))
        # To let readers follow the answer of a client that does not stream, the router streams it
        # from the engine: the last event of ``/generate`` equals the answer without streaming.
        collects = own is not None and not streams and not request.is_chat
        if collects:
            body["stream"] = True
        recorder = AnswerRecorder(own, self._endings, streams or collects)
        sent = replace(call, body=json.dumps(body).encode())
        answer = await self._send(sent, self._options.pd_router, recorder)
        if collects and isinstance(answer, RelayedStream):
            await answer.drain()
            if recorder.ending != "answered" or not recorder.last:
                raise EngineLost(f"{self._options.pd_router}: its answer broke off")
            failed = "error" in recorder.last
            return make_json_response(recorder.last, 502 if failed else answer.status_code)
        return answer

    async def _send(
        self, call: ForwardedRequest, target: str, recorder: AnswerRecorder
    ) -> Response:
        async with AsyncExitStack() as stack:
            return await forward(self._connections, call, target, recorder, stack)

    async def _delete_stream(self, stream: object, call: ForwardedRequest) -> None:
        """Delete a client's own prompt stream, which its request no longer needs."""
        if isinstance(stream, str) and stream.isalnum():
            with anyio.move_on_after(_DELETE_SECONDS, shield=True), suppress(EngineError):
                async with EngineClient(self._options.prefill, headers=call.api_key) as engine:
                    await engine.delete_stream(stream)


class EarlyPrefill:
    """Links the prompt of one request to the answers that it reads.

    Its failures are logged and not raised, because the request still contains the whole prompt.

    Args:
        engine: the prefill engine.
        answers: the answers that the request reads, by agent.
    """

    def __init__(
        self, engine: EngineClient, request: AgentRequest, answers: Mapping[str, ReadableAnswer]
    ) -> None:
        self._engine = engine
        self._request = request
        self._answers = answers
        self._link: Link | None = None
        self._scope = anyio.CancelScope()

    async def run(self) -> None:
        """Prefill what is certain of the prompt until :meth:`finish` has returned."""
        with self._scope:
            try:
                prompt = await self.build_prompt()
            except (EngineError, UnicodeError) as error:  # JSON may have half a surrogate pair.
                self._log_failure(error)
                return
            self._link = Link(
                self._engine,
                prompt,
                agent=self._request.agent or "a reader",
                add_special_tokens=not self._request.is_chat,
            )
            for answer in self._answers.values():
                answer._follow(self._link)
            await self._link.run()

    async def finish(self) -> Prefilled | None:
        """Prefill the rest of the prompt after all answers are complete, and release the stream.

        Its KV stays in the engine's cache like that of any request. Return how many tokens were
        cached and how many were computed; ``None`` if unknown.
        """
        if self._link is None:
            self._scope.cancel()
            return None
        try:
            if not (whole := self._link.prompt.stable()):
                return None
            # The chat template has added special tokens to the text of a chat.
            return await self._engine.prefill_only(
                text=whole, add_special_tokens=not self._request.is_chat
            )
        except (EngineError, UnicodeError) as error:
            self._log_failure(error)
            return None
        finally:
            self._link.end("unused")

    async def build_prompt(self) -> Prompt:
        """Return the prompt with slots for the answers, which have agents' names."""
        placeholders = Placeholders(self._answers)
        body = self._request.filled({name: placeholders.padded(name) for name in self._answers})
        if self._request.is_chat:
            text = await self._engine.render(body["messages"], **prompt_fields(body))
        else:
            text = body["text"]
        return placeholders.build_prompt(text)

    def _log_failure(self, error: Exception) -> None:
        text = "%s cannot prefill a prompt before its request: %s. It is computed with its request."
        url = self._engine.url
        logger.log(level_once(url, kind_of(error)), text, url, str(error).removesuffix("."))
