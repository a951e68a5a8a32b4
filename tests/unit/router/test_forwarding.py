"""Test how the router relays answers, and what it counts of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from starlette.requests import Request

from flashmoa.router.client_requests import ForwardedRequest
from flashmoa.router.connections import Connections, open_connections
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.forwarding import PlacementObserver, RelayedStream, forward
from flashmoa.router.metrics import RouterMetrics
from flashmoa.router.prefix_aware import PrefixAware

pytestmark = pytest.mark.anyio
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 999\r\n\r\n"


def make_metrics() -> RouterMetrics:
    policy = PrefixAware()
    return RouterMetrics(Dispatcher(policy), [], policy)


def value(metrics: RouterMetrics, name: str, **labels: str) -> float:
    """Return a counter's value; 0 if it was never raised."""
    every = ",".join(f'{label}="{text}"' for label, text in sorted(labels.items()))
    page, line = metrics.page().decode(), f"flashmoa_router_{name}_total{{{every}}} "
    return float(page.partition(line)[2].partition("\n")[0] or 0)


@asynccontextmanager
async def engine(answer: Callable[[SocketStream], Awaitable[None]]) -> AsyncGenerator[str]:
    """Run a server that reads one request and lets ``answer`` do the rest."""

    async def serve(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            await answer(stream)

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, serve)
        yield f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        group.cancel_scope.cancel()


def ask() -> ForwardedRequest:
    scope = {
        "type": "http", "method": "POST", "path": "/generate", "raw_path": b"/generate",
        "query_string": b"", "headers": [],
    }  # fmt: skip
    return ForwardedRequest.from_client(Request(scope), b"{}")


async def test_request_whose_client_leaves_before_the_answer_is_counted() -> None:
    metrics, reached = make_metrics(), anyio.Event()

    async def never(_stream: SocketStream) -> None:
        reached.set()
        await anyio.sleep_forever()

    async def send(connections: Connections, url: str) -> None:
        await forward(
            connections, ask(), url, PlacementObserver(metrics, "engine"), AsyncExitStack()
        )

    async with (
        engine(never) as url,
        open_connections() as connections,
        anyio.create_task_group() as client,
    ):
        client.start_soon(send, connections, url)
        await reached.wait()
        client.cancel_scope.cancel()
    assert value(metrics, "requests", engine="engine", ending="left") == 1


@pytest.mark.parametrize("sent", [b'data: {"text": "a"}\n\n', b'data: {"text": "a"}\n\ndata: {"te'])
async def test_error_of_a_lost_engine_is_an_event_of_its_own(sent: bytes) -> None:
    metrics, relayed = make_metrics(), b""

    async def die(stream: SocketStream) -> None:
        await stream.send(STREAM + sent)

    async def send(message: dict[str, bytes]) -> None:
        nonlocal relayed
        relayed += message.get("body", b"")

    async def receive() -> dict[str, str]:
        await anyio.sleep_forever()
        raise AssertionError

    async with engine(die) as url, open_connections() as connections:
        observer = PlacementObserver(metrics, "engine")
        answer = await forward(connections, ask(), url, observer, AsyncExitStack())
        assert isinstance(answer, RelayedStream)
        await answer({"type": "http"}, receive, send)  # type: ignore[arg-type]
    assert relayed.startswith(sent)
    before, error, rest = relayed.rsplit(b"\n\n", 2)
    assert error.startswith(b'data: {"error"') and rest == b"" and before == sent.rstrip(b"\n")
    assert value(metrics, "requests", engine="engine", ending="lost") == 1


OPENAI = b'{"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}'
NATIVE = (
    b'{"text": "\\"cached_tokens\\": 7", "meta_info": {"prompt_tokens": 5, "cached_tokens": 2}}'
)


@pytest.mark.parametrize(
    ("pieces", "cached", "of"),
    [
        ([OPENAI], 4, 9),
        ([b"[", NATIVE, b", ", NATIVE, b"]"], 4, 10),
        ([b"data: " + NATIVE + b"\n\n"] * 3, 2, 5),
        ([b'{"usage": {"prompt_tokens": 9}}'], 0, 0),
    ],
)
def test_cached_tokens_are_counted_with_the_prompts_that_report_them(
    pieces: list[bytes], cached: int, of: int
) -> None:
    metrics = make_metrics()
    observer = PlacementObserver(metrics, "engine")
    whole = not pieces[0].startswith(b"data")
    for piece in [b"".join(pieces)] if whole else pieces:
        observer.receive(piece)
    observer.end("answered")
    assert value(metrics, "cached_tokens", engine="engine") == cached
    assert value(metrics, "cache_reported_tokens", engine="engine") == of
