"""Answer chat completions with mixtures, staircases and debates (``application``)."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from flashmoa._starlette import while_connected
from flashmoa.moa.config import MixtureConfig
from flashmoa.moa.results import Result
from flashmoa.moa.run import Run
from flashmoa.moa.serve.answers import Completion, error_body
from flashmoa.moa.serve.chat_requests import ChatQuestion, ChatRequestRefused, parse_object
from flashmoa.moa.serve.event_stream import sending_events
from flashmoa.moa.serve.metrics import ServeMetrics
from flashmoa.moa.serve.served import ServedSystem

logger = logging.getLogger(__name__)

_RETRY_AFTER_SECONDS = 5


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Configures a server.

    Attributes:
        api_key: what clients send as their key; ``None``: they need none.
        max_questions: how many questions are answered at once; more are refused.
        heartbeat_seconds: the longest time without any byte in a streamed answer.
        max_body_bytes: the largest body of a request.
    """

    api_key: str | None = None
    max_questions: int = 64
    heartbeat_seconds: float = 10.0
    max_body_bytes: int = 32 << 20


class _AsciiResponse(JSONResponse):
    """JSON in ASCII: engines' errors may have half of a surrogate pair, which UTF-8 has not."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode()


def application(configs: Sequence[MixtureConfig], options: ServeOptions | None = None) -> Starlette:
    """Return a server of OpenAI's chat completions and models, ``/health`` and ``/metrics``."""
    server = _Server(configs, options or ServeOptions())
    routes = [
        Route("/v1/chat/completions", _ChatCompletions(server), methods=["POST"]),
        Route("/v1/models", server.list_models),
        Route("/v1/models/{name:path}", server.show_model),
        # These need no API key, as engines' do not.
        Route("/health", server.health),
        Route("/metrics", server.show_metrics),
    ]
    handlers: dict[Any, Any] = {
        ChatRequestRefused: _answer_error,
        HTTPException: _answer_http_error,
    }
    return Starlette(routes=routes, lifespan=server.lifespan, exception_handlers=handlers)


def _error_response(error: Exception, engines: Mapping[str, str] | None = None) -> Response:
    status, body = error_body(error, engines)
    headers = {"Retry-After": str(_RETRY_AFTER_SECONDS)} if status == 429 else None
    return _AsciiResponse(body, status, headers=headers)


async def _answer_error(_request: Request, error: Exception) -> Response:
    return _error_response(error)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Answer that there is no such route, in the form of the other errors."""
    assert isinstance(error, HTTPException)
    problem = f"{request.method} {request.url.path}: {error.detail}; see docs/mixture-of-agents.md"
    return _error_response(ChatRequestRefused(problem, status=error.status_code))


class _Server:
    """Holds the models of a server and the number of questions that they are answering."""

    def __init__(self, configs: Sequence[MixtureConfig], options: ServeOptions) -> None:
        self.options = options
        self.metrics = ServeMetrics()
        self._configs = {config.name: config for config in configs}
        self._systems: dict[str, ServedSystem] = {}
        self._started = int(time.time())
        self._running = 0

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncGenerator[None]:
        """Build the models while the server runs."""
        async with AsyncExitStack() as stack:
            for name, config in self._configs.items():
                self._systems[name] = await ServedSystem.build(config, stack)
            yield

    def check_key(self, request: Request) -> None:
        """Refuse a request without the API key. Raises: ChatRequestRefused"""
        expected = self.options.api_key
        if expected is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and secrets.compare_digest(
            given.strip().encode(), expected.encode()
        ):
            return
        # LiteLLM takes a 401 for one only by these words of OpenAI's.
        problem = "Incorrect API key provided; send the header Authorization: Bearer KEY"
        raise ChatRequestRefused(problem, code="invalid_api_key", status=401)

    def name_of(self, given: object) -> str:
        """Return the name of the model that a body asks for; empty if there is none."""
        if given is None and len(self._systems) == 1:
            [given] = self._systems
        return given if isinstance(given, str) and given in self._systems else ""

    def find(self, name: str | None) -> ServedSystem:
        """Return a model by its name. Raises: ChatRequestRefused if there is none."""
        if known := self.name_of(name):
            return self._systems[known]
        names = ", ".join(repr(name) for name in self._configs)
        problem = f"there is no model {name!r}; ask for {names}"
        raise ChatRequestRefused(problem, param="model", code="model_not_found", status=404)

    @contextmanager
    def place(self, name: str) -> Generator[None]:
        """Count a question among the running ones.

        Raises: ChatRequestRefused if there are as many as there may be.
        """
        most = self.options.max_questions
        if self._running >= most:
            problem = f"{most} questions are being answered, the most at once; ask again later"
            raise ChatRequestRefused(problem, code="rate_limit_exceeded", status=429)
        self._running += 1
        self.metrics.count_running(name, 1)
        try:
            yield
        finally:
            self._running -= 1
            self.metrics.count_running(name, -1)

    async def list_models(self, request: Request) -> Response:
        self.check_key(request)
        models = [self._describe(name) for name in self._configs]
        return _AsciiResponse({"object": "list", "data": models})

    async def show_model(self, request: Request) -> Response:
        self.check_key(request)
        return _AsciiResponse(self._describe(self.find(request.path_params["name"]).name))

    def _describe(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "flashmoa"}

    async def health(self, _request: Request) -> Response:
        return Response(status_code=200)

    async def show_metrics(self, _request: Request) -> Response:
        return Response(self.metrics.page, media_type="text/plain; version=0.0.4")


class _ChatCompletions:
    """Answers questions, as an ASGI application, so that each is answered within one call."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._metrics = server.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, name = Request(scope, receive), ""
        try:
            self._server.check_key(request)
            body = parse_object(await self._read(request))
            name = self._server.name_of(body.get("model"))
            chat = ChatQuestion.parse(body)
            system = self._server.find(chat.model)
            with self._server.place(system.name):
                await self._answer(request, send, chat, system)
        except ChatRequestRefused as error:
            self._metrics.count_ending(name, "refused")
            await _error_response(error)(scope, receive, send)
        except ClientDisconnect:
            self._metrics.count_ending(name, "left")

    async def _read(self, request: Request) -> bytes:
        most, body = self._server.options.max_body_bytes, bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                problem = f"the body is larger than {most} bytes; send a smaller request"
                raise ChatRequestRefused(problem, status=413)
        return bytes(body)

    async def _answer(
        self, request: Request, send: Send, chat: ChatQuestion, system: ServedSystem
    ) -> None:
        """Answer a question, and stop its agents if the client disconnects."""
        question = _Question(chat, system)
        try:
            async with while_connected(request):
                if chat.streams:
                    await self._stream(send, question)
                else:
                    await self._send_whole(request, send, question)
        finally:
            self._metrics.count_ending(system.name, question.ending)

    @asynccontextmanager
    async def _answering(self, question: _Question) -> AsyncGenerator[Run]:
        """Yield the run of a question, and count its tokens however it ends."""
        async with question.system.answering(question.chat) as run:
            try:
                yield run
            finally:
                self._metrics.count_tokens(question.system.name, run.agents)

    async def _send_whole(self, request: Request, send: Send, question: _Question) -> None:
        """Send the answer when it is complete."""
        system = question.system
        try:
            async with self._answering(question) as run:
                result = await run.result()
        except Exception as error:
            question.fail(error)
            response = _error_response(error, system.engines)
        else:
            self._finish(question, result)
            response = _AsciiResponse(Completion(system.name, system.engines).whole(result))
        await response(request.scope, request.receive, send)

    async def _stream(self, send: Send, question: _Question) -> None:
        """Send the answer while it is written."""
        chat, system = question.chat, question.system
        completion, has_begun = Completion(system.name, system.engines), False
        async with sending_events(send, self._server.options.heartbeat_seconds) as stream:
            try:
                async with self._answering(question) as run:
                    await stream.event(completion.chunk({"role": "assistant", "content": ""}))
                    async for piece in run:
                        if not has_begun:
                            self._metrics.observe_first_token(system.name, question.seconds)
                            has_begun = True
                        await stream.event(completion.chunk({"content": piece}))
                    result = await run.result()
            except Exception as error:
                question.fail(error)
                await stream.event(error_body(error, system.engines)[1])
                return
            self._finish(question, result)
            for body in completion.last_chunks(result, has_usage=chat.includes_usage):
                await stream.event(body)

    def _finish(self, question: _Question, result: Result) -> None:
        question.ending = "answered"
        self._metrics.observe_result(question.system.name, result, question.seconds)


class _Question:
    """Records how a question ends; ``left`` is what remains if the client disconnects."""

    def __init__(self, chat: ChatQuestion, system: ServedSystem) -> None:
        self.chat = chat
        self.system = system
        self.ending = "left"
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Return how long ago the question came."""
        return time.monotonic() - self._started

    def fail(self, error: Exception) -> None:
        """Log why the question is not answered."""
        status, _ = error_body(error)
        self.ending = "refused" if status < 500 else "failed"
        unexpected = error if status == 500 else None
        logger.warning("%s did not answer: %s", self.system.name, error, exc_info=unexpected)
