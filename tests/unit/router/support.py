"""Make short prompts of small blocks and policies; run routers in front of fake engines."""

import json
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import anyio
from hypothesis import settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from flashmoa.router.application import application
from flashmoa.router.cache_tables import Blocks, EngineTraits, token_blocks
from flashmoa.router.engines import RouterOptions
from flashmoa.router.flops import TOKENS, Measure
from flashmoa.router.forwarding import STREAMS, Connections
from flashmoa.router.hearing import CALLS
from flashmoa.router.policy import PrefixAware, WaitingRequest
from flashmoa.router.saturation import FullLoad
from flashmoa.router.shell.application import ShellOptions, shell_application
from tests.integration.router.serving import serve

SIZE = 4
STEPS = settings(max_examples=50, stateful_step_count=30)
# There are only two different tokens, so that prompts share prefixes.
PROMPTS = st.lists(st.integers(0, 1), max_size=20)
FLOPS = Measure(linear=7, pair=3)
MEASURES: st.SearchStrategy[Measure] = st.sampled_from([TOKENS, FLOPS])


def blocks(tokens: Sequence[int]) -> Blocks:
    return token_blocks(tokens, SIZE)


def prefixes(tokens: Sequence[int]) -> set[tuple[int, ...]]:
    """Return every prefix that consists of whole blocks."""
    return {tuple(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)}


def policy(engines: int, measure: Measure, limit: int | None, patience: float = 0.0) -> PrefixAware:
    """Return the paper's policy for engines ``e0``, ``e1``, ..., or one with some patience.

    Args: limit: the work that fills an engine.
    """
    routing = PrefixAware(block_tokens=SIZE, patience=patience)
    full = None if limit is None else FullLoad(limit)
    for number in range(engines):
        routing.join(f"e{number}", EngineTraits(measure, full))
    return routing


def load(routing: PrefixAware, engine: str = "e0") -> int:
    return routing.engines[engine].load.total


def place(routing: PrefixAware, name: str, prompt: Blocks) -> str | None:
    """Route a request that is alone in the queue; return its engine, or ``None`` if it waits."""
    return routing.route([WaitingRequest(name, prompt)]).get(name)


class FakeConnections(Connections):
    """Answers the router's own questions.

    Args:
        answer: returns the answer to a host and a path: an object, a status with an object, or
            ``None`` for an engine that is silent. Raises: EngineLost for one that is lost.
    """

    def __init__(self, answer: Callable[[str, str], object]) -> None:
        super().__init__(cast("Any", None))
        self._answer = answer
        self.asked: list[Any] = []

    async def ask(
        self, url: str, headers: Mapping[str, str], body: bytes | None = None, **_: float
    ) -> Response | None:
        await anyio.lowlevel.checkpoint()
        parts = urlsplit(url)
        self.asked.append(json.loads(body or b"null"))
        answer = self._answer(parts.netloc, parts.path)
        if answer is None:
            return None
        status, content = answer if isinstance(answer, tuple) else (200, answer)
        return Response(json.dumps(content), status)


KEY = {"authorization": "Bearer right"}
# What an engine refuses while it drains; it takes other requests.
DRAINING = {("GET", "/health/ready"), ("POST", STREAMS), ("POST", "/prefill_only")}
CHANNEL = "0123456789abcdef"
LISTENING = b'{"listening":true}\n'


class FakeEngine:
    """Answers every request that has the right API key.

    Args:
        streams: the ids of its prompt streams.
        needs_key: whether it refuses requests without the right API key.
        tells: pieces that it sends on each channel. The channel then stays open until ``hangs_up``.

    Attributes:
        requests: the requests that it accepted, except the router's own.
        refuses: methods and paths that it answers as while it drains.
    """

    def __init__(self, *streams: str, needs_key: bool = True, tells: Iterable[bytes] = ()) -> None:
        self._streams = streams
        self._needs_key = needs_key
        self._tells = [LISTENING, *tells]
        self._settings: dict[str, Any] = {}
        self.requests: list[str] = []
        self.refuses: set[tuple[str, str]] = set()
        self.hangs_up, self.left = anyio.Event(), anyio.Event()

    def advertise(self, address: str) -> None:
        """Tell routers where KV events are published."""
        self._settings["kv_events_config"] = json.dumps({"publisher": "zmq", "endpoint": address})

    def app(self) -> Starlette:
        methods = ["GET", "POST", "PUT", "DELETE"]
        return Starlette(routes=[Route("/{path:path}", self._answer, methods=methods)])

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        await request.body()
        if (request.method, path) in self.refuses:
            return JSONResponse({"error": {"code": "draining", "message": "No."}}, 503)
        if self._needs_key and request.headers.get("authorization") != KEY["authorization"]:
            return JSONResponse({"error": "Unauthorized"}, 401)
        if path == CALLS:
            assert request.headers["x-flashmoa-channel"] == CHANNEL
            return StreamingResponse(self._tell(), media_type="application/x-ndjson")
        if path in ("/server_info", "/model_info"):
            return JSONResponse(self._settings)
        if path not in ("/health/ready", "/flashmoa/info"):
            self.requests.append(f"{request.method} {path}")
        if path == "/flashmoa/info":
            return JSONResponse({"capabilities": ["calls", "follow"]})
        if path == STREAMS:
            count, opened = {"open": len(self._streams)}, {"id": self._streams[0]}
            return JSONResponse(count if request.method == "GET" else opened)
        if path.startswith(f"{STREAMS}/") and path.split("/")[2] not in self._streams:
            return JSONResponse({"error": {"code": "unknown_stream"}}, 404)
        return JSONResponse({"tokens": [1] * 40, "text": "yes", "output_ids": [1], "meta_info": {}})

    async def _tell(self) -> AsyncGenerator[bytes]:
        try:
            for piece in self._tells:
                yield piece
                # Each piece is sent by itself.
                await anyio.sleep(0.001)
            await self.hangs_up.wait()
        finally:
            self.left.set()


class RouterClient:
    """Calls an application as a web server would."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    async def __call__(
        self,
        method: str,
        path: str,
        body: bytes | Mapping[str, Any] = b"",
        headers: Mapping[str, str] | None = None,
        query: bytes = b"",
    ) -> tuple[int, bytes]:
        """Return the answer's status and body. Raises: what the application raises.

        ``path`` is percent-encoded; a mapping is sent as JSON.
        """
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        bodies: Iterator[bytes] = iter([sent])
        status, pieces = 0, list[bytes]()

        async def receive() -> dict[str, Any]:
            if (piece := next(bodies, None)) is None:
                await anyio.sleep_forever()
            return {"type": "http.request", "body": piece, "more_body": False}

        async def send(message: Mapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            pieces.append(message.get("body", b""))

        scope = {
            "type": "http",
            "method": method,
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query,
            "headers": [
                (name.lower().encode("latin-1"), value.encode("latin-1"))
                for name, value in ({"host": "router"} | dict(headers or {})).items()
            ],
        }
        await self._app(scope, receive, send)
        return status, b"".join(pieces)

    async def post(self, path: str, headers: Mapping[str, str] | None = KEY, **body: Any) -> bytes:
        """Send a request that is accepted; return its answer."""
        status, answer = await self("POST", path, body, headers)
        assert status == 200, answer
        return answer

    async def refused(self, *request: Any) -> tuple[int, dict[str, Any]]:
        """Send a request; return the status and the error."""
        status, content = await self(*request)
        return status, json.loads(content)["error"]


@asynccontextmanager
async def running(app: Starlette) -> AsyncGenerator[RouterClient]:
    async with app.router.lifespan_context(app):
        yield RouterClient(app)


@asynccontextmanager
async def routing(*engines: FakeEngine, **options: Any) -> AsyncGenerator[RouterClient]:
    """Run a router in front of fake engines."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serve(engine.app())) for engine in engines]
        all_options = RouterOptions(urls, api_key="right", watch_seconds=60, **options)
        yield await stack.enter_async_context(running(application(all_options)))


@asynccontextmanager
async def pair(
    engine: FakeEngine, seconds: float = 0.01, *, decodes: bool = False
) -> AsyncGenerator[RouterClient]:
    """Run a shell router; the engine is both its prefill engine and its pair's router.

    Args: decodes: whether the router knows it as the pair's decode engine, too.
    """
    async with serve(engine.app()) as url:
        decode = [url] if decodes else []
        options = ShellOptions(url, url, decode, agent_seconds=seconds)
        async with running(shell_application(options)) as client:
            yield client
