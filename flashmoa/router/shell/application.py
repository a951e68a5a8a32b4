"""Serve a PD pair and its own router at one address (`shell_application`).

Prompts are prefilled while agents write answers in them (`EarlyPrefill`; Faster-MoA §4.3).
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import cast

import anyio
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response

from flashmoa._concurrency import all_of
from flashmoa.engine import EngineClient, EngineSettings, prompt_fields
from flashmoa.engine.wire import NAMESPACE_FIELDS
from flashmoa.errors import EngineError
from flashmoa.link.link import Link, kind_of
from flashmoa.link.prompt import Placeholders, Prompt
from flashmoa.link.prompt_feed import level_once
from flashmoa.router.forwarding import (
    CHAT,
    STREAMS,
    AnswerObserver,
    EngineLost,
    ForwardedRequest,
    make_application,
    make_error_response,
    make_route,
    open_connections,
    parse_object,
)
from flashmoa.router.hearing import CALLS, HeardChannels
from flashmoa.router.shell.agents import (
    AgentFailed,
    AgentPromptCache,
    AgentRequest,
    AnswerRecorder,
    ReadableAnswer,
    parse_request,
)

logger = logging.getLogger(__name__)

# The prefill engine answers these, so FlashMoA's clients can use a PD pair like one engine.
_PREFILL_ROUTES = ("/prefill_only", "/render", STREAMS, "/flashmoa", "/tokenize", "/detokenize")
# The capability of engines that report the text of calls.
_HEARS = "calls"


@dataclass(frozen=True, slots=True)
class ShellOptions:
    """Configures a shell router: the URLs of a prefill engine and of the pair's own router.

    Attributes:
        decode: the URLs of the decode engines, which report the text of calls.
        agent_seconds: how long a request waits for an answer that it reads.
    """

    prefill: str
    pd_router: str
    decode: Sequence[str] = ()
    agent_seconds: float = 600.0
    max_body_bytes: int = 32 << 20


def shell_application(options: ShellOptions) -> Starlette:
    """Return a server of the PD router's routes, agents' chats, and prompt streams."""
    shell, limit = _Shell(options), options.max_body_bytes
    routes = [
        make_route(CHAT, shell.chat, limit, "POST"),
        make_route(CALLS, shell.hear, limit, "GET"),
        make_route("/flashmoa/info", shell.info, limit, "GET"),
        make_route("/{path:path}", shell.pass_on, limit, "GET", "POST", "PUT", "DELETE"),
    ]
    return make_application(routes, shell.lifespan)


class _Shell:
    def __init__(self, options: ShellOptions) -> None:
        self._options = options
        self._cache = AgentPromptCache()

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        async with open_connections() as self._connections:
            self._channels = app.state.channels = HeardChannels(self._connections)
            yield

    async def pass_on(self, call: ForwardedRequest) -> Response:
        if call.path.startswith(_PREFILL_ROUTES):
            return await self._connections.forward(call, self._options.prefill)
        return await self._forward(call)

    async def _forward(
        self, call: ForwardedRequest, observer: AnswerObserver | None = None
    ) -> Response:
        """Send a request to the pair's router, which chooses among the decode engines."""
        async with AsyncExitStack() as stack:
            stack.enter_context(self._channels.calling(call.headers, *self._options.decode))
            url = self._options.pd_router
            return await self._connections.forward(call, url, observer, stack.pop_all())

    async def info(self, call: ForwardedRequest) -> Response:
        """Answer with the prefill engine's capabilities, and with a decode engine's ``calls``."""
        answer = await self.pass_on(call)
        told = parse_object(answer.body)
        has = told.get("capabilities")
        if isinstance(has, list) and _HEARS not in has and await self._hears(call):
            return JSONResponse({**told, "capabilities": [*cast("list[str]", has), _HEARS]})
        return answer

    async def _hears(self, call: ForwardedRequest) -> bool:
        """Return whether a decode engine reports the text of calls."""
        for engine in self._options.decode:
            with suppress(EngineLost):
                answer = await self._connections.ask(engine + call.path, call.api_key)
                if answer and _HEARS in parse_object(answer.body).get("capabilities", ()):
                    return True
        return False

    async def hear(self, call: ForwardedRequest) -> Response:
        """Open a channel, once the prefill engine has accepted the client's key."""
        if not self._options.decode:
            message = "the router knows no decode engine that it could hear; start it with --decode"
            return make_error_response(404, message)
        return await self._check_key(call) or self._channels.open(call)

    async def _check_key(self, call: ForwardedRequest) -> Response | None:
        """Return the prefill engine's refusal of the client's key, if it refuses it."""
        check = replace(call, method="GET", target="/model_info", headers=call.api_key, body=b"")
        checked = await self._connections.forward(check, self._options.prefill)
        return checked if checked.status_code in (401, 403) else None

    async def chat(self, call: ForwardedRequest) -> Response:
        """Answer a chat, which may read agents' answers or write one."""
        request = parse_request(parse_object(call.body))
        if request.agent is None and not request.marks:
            return await self.pass_on(call)
        # This is quick. A client with a wrong key must not wait here for answers.
        if refused := await self._check_key(call):
            return refused
        client = call.api_key.get("authorization", "")
        answers = {one: self._cache.read((client, request.workflow, one)) for one in request.marks}
        if request.agent is None:
            return await self._answer(request, answers, call)
        own = self._cache.begin((client, request.workflow, request.agent))
        recorder = AnswerRecorder(own, is_stream=bool(request.body.get("stream")))
        try:
            return await self._answer(request, answers, call, recorder)
        except BaseException as error:
            if not own.is_over:
                reason = error if isinstance(error, Exception) else "its client left"
                own.fail(AgentFailed(f"{own.name}'s request failed: {reason}"))
            raise

    async def _answer(
        self,
        request: AgentRequest,
        answers: Mapping[str, ReadableAnswer],
        call: ForwardedRequest,
        observer: AnswerObserver | None = None,
    ) -> Response:
        """Send a request once the answers that it reads are complete. Prefill it meanwhile.

        Raises: AgentFailed if an answer fails or does not arrive in time.
        """
        is_alone = any(request.body.get(name) for name in NAMESPACE_FIELDS)
        if is_alone or all(answer.is_over for answer in answers.values()):
            await self._complete(answers)
        else:
            url, settings = self._options.prefill, EngineSettings(without_plugin="off")
            async with EngineClient(url, headers=call.api_key, engine_settings=settings) as engine:
                early = EarlyPrefill(engine, request, answers)

                async def complete() -> None:
                    await self._complete(answers)
                    await early.finish()

                await all_of([early.run, complete])
        body = request.filled({agent: answer.written for agent, answer in answers.items()})
        sent = replace(call, body=json.dumps(body).encode())
        return await self._forward(sent, observer)

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


class EarlyPrefill:
    """Links a chat's prompt to the answers that it reads. ``answers`` is keyed by agent.

    Failures are logged and not raised, because the request still contains the whole prompt.
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
        """Prefill the certain part of the prompt until :meth:`finish` has returned."""
        with self._scope:
            try:
                prompt = await self.build_prompt()
            except (EngineError, UnicodeError) as error:  # JSON may contain half a surrogate pair.
                self._log_failure(error)
                return
            self._link = Link(self._engine, prompt, agent=self._request.agent or "a reader")
            for answer in self._answers.values():
                answer._feed_to(self._link)
            await self._link.run()

    async def finish(self) -> None:
        """Prefill the rest of the prompt after all answers are complete, and release the stream."""
        if self._link is None:
            self._scope.cancel()
            return
        try:
            if whole := self._link.prompt.stable():
                # The chat template has added special tokens.
                await self._engine.prefill_only(text=whole, add_special_tokens=False)
        except (EngineError, UnicodeError) as error:
            self._log_failure(error)
        finally:
            self._link.end("unused")

    async def build_prompt(self) -> Prompt:
        """Return the prompt, with a slot for each answer, named after its agent."""
        placeholders = Placeholders(self._answers)
        body = self._request.filled({name: placeholders.padded(name) for name in self._answers})
        text = await self._engine.render(body["messages"], **prompt_fields(body))
        return placeholders.build_prompt(text)

    def _log_failure(self, error: Exception) -> None:
        text = "%s cannot prefill a prompt before its request: %s. It is computed with its request."
        url = self._engine.url
        logger.log(level_once(url, kind_of(error)), text, url, str(error).removesuffix("."))
