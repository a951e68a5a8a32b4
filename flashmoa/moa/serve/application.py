"""Answer OpenAI's requests with mixtures, staircases, debates and councils (``application``)."""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from flashmoa._starlette import read_body, while_connected
from flashmoa.moa.config import ServedSystem
from flashmoa.moa.results import Result
from flashmoa.moa.serve.chat_completions import (
    ChatQuestion,
    ChatRequestRefused,
    Completion,
    describe_agents,
    error_body,
    parse_object,
)
from flashmoa.moa.serve.responses import Response as ResponseBody
from flashmoa.moa.serve.responses import parse_response_request

logger = logging.getLogger(__name__)

# In seconds. A question takes several answers, one after another.
_BUCKETS = (0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480)
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Without this header, nginx buffers answers.
    (b"x-accel-buffering", b"no"),
]
# A line that begins with a colon is a comment, which every client skips.
_HEARTBEAT = b": agents are working\n\n"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Configures a server.

    Attributes:
        api_key: the key that clients must send; ``None``: they need no key.
        max_questions: how many questions are answered at once; more are refused.
        heartbeat_seconds: the longest time without any byte in a streamed answer.
    """

    api_key: str | None = None
    max_questions: int = 64
    heartbeat_seconds: float = 10.0
    max_body_bytes: int = 32 << 20


def application(systems: Sequence[ServedSystem], options: ServeOptions | None = None) -> Starlette:
    """Return a server of OpenAI's chat completions, responses and models, with ``/health``.

    ``/metrics`` has its metrics for Prometheus.

    The server closes the connections to engines when it ends.
    """
    server = _Server(systems, options or ServeOptions())
    routes = [
        Route("/v1/chat/completions", _Asking(server, is_response=False), methods=["POST"]),
        Route("/v1/responses", _Asking(server, is_response=True), methods=["POST"]),
        Route("/v1/models", server.list_models),
        Route("/v1/models/{name:path}", server.show_model),
        # These need no API key, as engines' do not.
        Route("/health", server.health),
        Route("/metrics", server.show_metrics),
    ]
    handlers: dict[Any, Any] = {ChatRequestRefused: _refuse}
    app = Starlette(routes=routes, lifespan=server.lifespan, exception_handlers=handlers)
    # A redirect would name the Host header's server, and fails for a query that is not UTF-8.
    app.router.redirect_slashes = False
    return app


class _AsciiResponse(JSONResponse):
    """JSON in ASCII: UTF-8 cannot encode half a surrogate pair, as in some errors of engines."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode()


async def _refuse(_request: Request, error: Exception) -> Response:
    status, body = error_body(error)
    headers = {"Retry-After": "5"} if status == 429 else None
    return _AsciiResponse(body, status, headers=headers)


class _Metrics:
    """The metrics of one server; ``model`` is the name that clients ask for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.questions = self._make(Counter, "questions", "Questions by ending", "ending")
        self.running = self._make(Gauge, "running", "Questions that are being answered")
        text = "Agents by what became of their answers"
        self.agents = self._make(Counter, "agents", text, "agent_model", "status")
        self.tokens = self._make(Counter, "tokens", "Tokens by kind", "agent_model", "kind")
        text = "Answers that another agent gave in place of the last one"
        self.substitutions = self._make(Counter, "substitutions", text, "kind")
        self.seconds = self._make(Histogram, "seconds", "Time of a question", buckets=_BUCKETS)
        text = "Time to a streamed answer's first token"
        self.first_token = self._make(Histogram, "first_token_seconds", text, buckets=_BUCKETS)

    def _make(self, kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
        return kind(
            f"flashmoa_moa_{name}", text, ["model", *labels], registry=self.registry, **more
        )


@dataclass(slots=True)
class _Question:
    """A question that is being answered, for metrics and logs.

    Attributes:
        ending: ``left`` unless it is answered, refused or fails, since the client disconnected.
    """

    chat: ChatQuestion
    served: ServedSystem
    form: Completion | ResponseBody
    metrics: _Metrics
    ending: str = "left"
    _started: float = field(default_factory=time.monotonic)
    _has_begun: bool = False

    def describe(self, result: Result) -> dict[str, Any]:
        """Return the field ``flashmoa`` of the answer's body."""
        served, asked = self.served, self.chat.shows_answers
        shows = served.show_answers if asked is None else asked
        verdict = served.system.verdict(result)
        agents = describe_agents(result, served.engine_names, shows_answers=shows)
        return {**agents, **({"council": verdict} if verdict else {})}

    @asynccontextmanager
    async def answering(self) -> AsyncGenerator[Any]:
        """Yield its run. Count its tokens however it ends, estimated if no engine counted."""
        chat, name, tokens = self.chat, self.served.name, self.metrics.tokens
        async with self.served.system.answering(chat.messages, chat.parameters) as run:
            try:
                yield run
            finally:
                for agent in run.agents:
                    spent, model = agent.spent(), agent.model.model
                    tokens.labels(name, model, "prompt").inc(spent.prompt_tokens)
                    tokens.labels(name, model, "completion").inc(spent.completion_tokens)

    def begin(self) -> None:
        """Observe the time to the first piece of the answer."""
        if not self._has_begun:
            self._has_begun = True
            seconds = time.monotonic() - self._started
            self.metrics.first_token.labels(self.served.name).observe(seconds)

    def finish(self, result: Result) -> None:
        """Count a question that is answered."""
        self.ending, name, metrics = "answered", self.served.name, self.metrics
        metrics.seconds.labels(name).observe(time.monotonic() - self._started)
        if result.substitution is not None:
            metrics.substitutions.labels(name, result.substitution.kind).inc()
        for agent in result.agents:
            metrics.agents.labels(name, agent.model, agent.status).inc()

    def fail(self, error: Exception) -> tuple[int, dict[str, Any]]:
        """Log why the question is not answered. Return the status and the body of the error."""
        status, body = error_body(error, self.served.engine_names)
        self.ending = "refused" if status < 500 else "failed"
        unexpected = error if status == 500 else None
        logger.warning("%s did not answer: %s", self.served.name, error, exc_info=unexpected)
        return status, body


@dataclass(frozen=True, slots=True)
class _Asking:
    """A route's ASGI application, which answers a question within one call."""

    server: _Server
    is_response: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.server.ask(scope, receive, send, is_response=self.is_response)


class _Server:
    """Answers questions of both APIs, and tells what it serves."""

    def __init__(self, systems: Sequence[ServedSystem], options: ServeOptions) -> None:
        self._options = options
        self._metrics = _Metrics()
        self._systems = {system.name: system for system in systems}
        self._started = int(time.time())
        self._running = 0

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncGenerator[None]:
        """Close the connections to engines when the server ends."""
        try:
            yield
        finally:
            for system in self._systems.values():
                await system.close()

    async def ask(self, scope: Scope, receive: Receive, send: Send, *, is_response: bool) -> None:
        """Answer a chat completion, or a request of the Responses API."""
        request, name = Request(scope, receive), ""
        try:
            self._check_key(request)
            body = parse_object(await self._read(request))
            name = self._name_of(body.get("model"))
            chat = (parse_response_request if is_response else ChatQuestion.parse)(body)
            served = self._find(chat.model)
            form = Completion(served.name, chat.includes_usage)
            if is_response:
                form = ResponseBody(served.name, body)
            with self._place(served.name):
                await self._answer(request, send, _Question(chat, served, form, self._metrics))
        except ChatRequestRefused as error:
            self._metrics.questions.labels(name, "refused").inc()
            response = await _refuse(request, error)
            await response(scope, receive, send)
        except ClientDisconnect:
            self._metrics.questions.labels(name, "left").inc()

    def _check_key(self, request: Request) -> None:
        """Raise ChatRequestRefused without the API key."""
        expected = self._options.api_key
        if expected is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and secrets.compare_digest(
            given.strip().encode(), expected.encode()
        ):
            return
        # LiteLLM recognises a wrong key only if the error has OpenAI's words.
        problem = "Incorrect API key provided; send the header Authorization: Bearer KEY"
        raise ChatRequestRefused(problem, code="invalid_api_key", status=401)

    async def _read(self, request: Request) -> bytes:
        try:
            return await read_body(request, self._options.max_body_bytes)
        except HTTPException as error:
            raise ChatRequestRefused(error.detail, status=error.status_code) from error

    def _name_of(self, given: object) -> str:
        """Return the name of the model that a body asks for; empty if there is no such model."""
        if given is None and len(self._systems) == 1:
            [given] = self._systems
        return given if isinstance(given, str) and given in self._systems else ""

    def _find(self, name: str | None) -> ServedSystem:
        """Return a model by its name. Raises: ChatRequestRefused if there is no such model."""
        if known := self._name_of(name):
            return self._systems[known]
        names = ", ".join(repr(name) for name in self._systems)
        problem = f"there is no model {name!r}; ask for {names}"
        raise ChatRequestRefused(problem, param="model", code="model_not_found", status=404)

    @contextmanager
    def _place(self, name: str) -> Generator[None]:
        """Count a running question. Raises: ChatRequestRefused if ``max_questions`` run already."""
        most = self._options.max_questions
        if self._running >= most:
            problem = f"{most} questions are being answered, the most at once; ask again later"
            raise ChatRequestRefused(problem, code="rate_limit_exceeded", status=429)
        self._running += 1
        self._metrics.running.labels(name).inc()
        try:
            yield
        finally:
            self._running -= 1
            self._metrics.running.labels(name).dec()

    async def _answer(self, request: Request, send: Send, question: _Question) -> None:
        """Answer a question, and stop its agents if the client disconnects."""
        try:
            async with while_connected(request):
                if question.chat.streams:
                    await self._stream(send, question)
                else:
                    await self._send_whole(request, send, question)
        finally:
            self._metrics.questions.labels(question.served.name, question.ending).inc()

    async def _send_whole(self, request: Request, send: Send, question: _Question) -> None:
        try:
            async with question.answering() as run:
                result = await run.result()
        except Exception as error:
            status, body = question.fail(error)
        else:
            question.finish(result)
            status, body = 200, question.form.whole(result, question.describe(result))
        await _AsciiResponse(body, status)(request.scope, request.receive, send)

    async def _stream(self, send: Send, question: _Question) -> None:
        form, heartbeat = question.form, self._options.heartbeat_seconds
        async with sending_events(send, heartbeat) as send_events:
            try:
                await send_events(form.begin())
                async with question.answering() as run:
                    async for piece in run:
                        question.begin()
                        await send_events(form.add(piece))
                    result = await run.result()
            except Exception as error:
                await send_events(form.fail(question.fail(error)[1]))
                return
            question.finish(result)
            await send_events(form.end(result, question.describe(result)))

    async def list_models(self, request: Request) -> Response:
        self._check_key(request)
        models = [self._describe(name) for name in self._systems]
        return _AsciiResponse({"object": "list", "data": models})

    async def show_model(self, request: Request) -> Response:
        self._check_key(request)
        return _AsciiResponse(self._describe(self._find(request.path_params["name"]).name))

    def _describe(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "flashmoa"}

    async def health(self, _request: Request) -> Response:
        return Response(status_code=200)

    async def show_metrics(self, _request: Request) -> Response:
        page = generate_latest(self._metrics.registry)
        return Response(page, media_type="text/plain; version=0.0.4")


@asynccontextmanager
async def sending_events(
    send: Send, heartbeat_seconds: float
) -> AsyncGenerator[Callable[[Sequence[Mapping[str, Any]]], Awaitable[None]]]:
    """Send the head of an answer, yield a function that sends events with JSON, and end it.

    Events of the Responses API have a ``type``, which is also the event's name.

    Proxies and clients end silent connections. Therefore a comment is sent when there was no event
    for ``heartbeat_seconds``.
    """
    last_sent = -math.inf

    async def write(data: bytes, *, more: bool = True) -> None:
        nonlocal last_sent
        last_sent = anyio.current_time()
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def send_events(bodies: Sequence[Mapping[str, Any]]) -> None:
        for body in bodies:
            name = f"event: {body['type']}\n" if "type" in body else ""
            await write(f"{name}data: {json.dumps(body)}\n\n".encode())

    async def keep_alive() -> None:
        while True:
            await anyio.sleep_until(last_sent + heartbeat_seconds)
            if anyio.current_time() >= last_sent + heartbeat_seconds:
                await write(_HEARTBEAT)

    await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
    async with anyio.create_task_group() as group:
        group.start_soon(keep_alive)
        yield send_events
        group.cancel_scope.cancel()
    await write(b"data: [DONE]\n\n", more=False)
