"""Serve a PD pair and its own router at one address (`shell_application`).

Prompts are prefilled while agents write answers in them (`EarlyPrefill`; Faster-MoA §4.3).
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import anyio
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from flashmoa._concurrency import all_of
from flashmoa.engine import EngineClient, EngineSettings, prompt_fields
from flashmoa.errors import EngineError
from flashmoa.linking.link import Link, kind_of
from flashmoa.linking.prompt import Placeholders, Prompt
from flashmoa.linking.prompt_feed import level_once
from flashmoa.router.forwarding import (
    CHAT,
    STREAMS,
    AnswerObserver,
    ForwardedRequest,
    make_application,
    make_endpoint,
    open_connections,
    parse_object,
)
from flashmoa.router.shell.agents import (
    AgentFailed,
    AgentPromptCache,
    AgentRequest,
    AnswerRecorder,
    ReadableAnswer,
    parse_request,
)

logger = logging.getLogger(__name__)

# The prefill engine answers these, so that FlashMoA's clients can use a PD pair like one engine.
_PREFILL_ROUTES = ("/prefill_only", "/render", STREAMS, "/flashmoa", "/tokenize", "/detokenize")
# Fields that prevent a request from sharing KV with other requests that have the same tokens.
_NAMESPACE = ("cache_salt", "extra_key", "lora_path")


@dataclass(frozen=True, slots=True)
class ShellOptions:
    """Configures a shell router: the URLs of a prefill engine and of the pair's own router."""

    prefill: str
    pd_router: str
    # How long a request waits for an answer that it reads.
    agent_seconds: float = 600.0
    max_body_bytes: int = 32 << 20


def shell_application(options: ShellOptions) -> Starlette:
    """Return a server of the PD router's routes, agents' chats, and prompt streams."""
    shell = _Shell(options)
    chat = make_endpoint(shell.chat, options.max_body_bytes)
    pass_on = make_endpoint(shell.pass_on, options.max_body_bytes)
    routes = [
        Route(CHAT, chat, methods=["POST"]),
        Route("/{path:path}", pass_on, methods=["GET", "POST", "PUT", "DELETE"]),
    ]
    return make_application(routes, shell.lifespan)


class _Shell:
    def __init__(self, options: ShellOptions) -> None:
        self._options = options
        self._cache = AgentPromptCache()

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncGenerator[None]:
        async with open_connections() as self._connections:
            yield

    async def pass_on(self, call: ForwardedRequest) -> Response:
        is_for_prefill = call.path.startswith(_PREFILL_ROUTES)
        url = self._options.prefill if is_for_prefill else self._options.pd_router
        return await self._connections.forward(call, url)

    async def chat(self, call: ForwardedRequest) -> Response:
        """Answer a chat, which may read agents' answers or write one."""
        request = parse_request(parse_object(call.body))
        if request.agent is None and not request.marks:
            return await self.pass_on(call)
        # A client whose key the engine refuses must not wait here for answers; this is quick.
        check = replace(call, method="GET", target="/model_info", headers=call.api_key, body=b"")
        checked = await self._connections.forward(check, self._options.prefill)
        if checked.status_code in (401, 403):
            return checked
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
        """Send a request once the answers that it reads are complete; prefill it meanwhile.

        Raises: AgentFailed if an answer fails or does not arrive in time.
        """
        is_alone = any(request.body.get(name) for name in _NAMESPACE)
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
        return await self._connections.forward(sent, self._options.pd_router, observer)

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
    """Links the prompt of one chat to the answers that it reads, which are given by agent.

    Its failures are logged and not raised, because the request still contains the whole prompt.
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
            self._link = Link(self._engine, prompt, agent=self._request.agent or "a reader")
            for answer in self._answers.values():
                answer._follow(self._link)
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
        """Return the prompt with slots for the answers, which have agents' names."""
        placeholders = Placeholders(self._answers)
        body = self._request.filled({name: placeholders.padded(name) for name in self._answers})
        text = await self._engine.render(body["messages"], **prompt_fields(body))
        return placeholders.build_prompt(text)

    def _log_failure(self, error: Exception) -> None:
        text = "%s cannot prefill a prompt before its request: %s. It is computed with its request."
        url = self._engine.url
        logger.log(level_once(url, kind_of(error)), text, url, str(error).removesuffix("."))
