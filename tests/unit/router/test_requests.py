"""Test the answers of routers in front of fake engines, and that routers keep no request."""

import json
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import quote

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashmoa.router.application import POLICY_ROUTES, application
from flashmoa.router.engines import RouterOptions
from flashmoa.router.forwarding import CHAT, STREAMS, Connections, EngineLost
from tests.event_loop import own_task
from tests.integration.router.serving import InTurn
from tests.retention import kept_by
from tests.unit.router.support import (
    DRAINING,
    KEY,
    FakeEngine,
    RouterClient,
    pair,
    routing,
    running,
)

GENERATE = "/generate"


@asynccontextmanager
async def streams_on_two_engines() -> AsyncGenerator[tuple[RouterClient, list[FakeEngine]]]:
    """Open the stream ``a`` on the first engine, and ``b`` on the second."""
    engines = [FakeEngine("a"), FakeEngine("b")]
    async with routing(*engines, policy=InTurn()) as client:
        for _ in engines:
            await client.post(STREAMS, text="x")
        yield client, engines
    assert engines[0].requests == [f"POST {STREAMS}"]
    assert engines[1].requests.pop(0) == f"POST {STREAMS}"


async def test_requests_go_to_the_engine_of_their_stream() -> None:
    by_header = {**KEY, "X-Request-Id-FlashMoA-Stream": "b"}
    async with streams_on_two_engines() as (client, engines):
        for method, rest in (("POST", "/keep_alive"), ("POST", "/append"), ("GET", "")):
            assert (await client(method, f"{STREAMS}/b{rest}", headers=KEY))[0] == 200
        status, error = await client.refused("POST", f"{STREAMS}/c/keep_alive", b"", KEY)
        assert status == 404 and error["code"] == "unknown_stream"
        for _ in range(2):
            await client.post(GENERATE, text="x", prompt_stream_id="b")
            await client.post(GENERATE, by_header, text="x")
    about = [f"POST {STREAMS}/b/keep_alive", f"POST {STREAMS}/b/append", f"GET {STREAMS}/b"]
    assert engines[1].requests == [*about, *[f"POST {GENERATE}"] * 4]


@pytest.mark.parametrize("path", [STREAMS, "/prefill_only"])
async def test_a_draining_engines_refusals_go_elsewhere(path: str) -> None:
    """The router has not noticed yet that the engine drains; afterwards it sends nothing there."""
    engines = [FakeEngine("a"), FakeEngine("b")]
    async with routing(*engines, policy=InTurn()) as client:
        engines[0].refuses = DRAINING
        for target in (path, path, path, GENERATE, GENERATE):
            await client.post(target, text="x")
        # The streams of the draining engine are closed, and their requests are served elsewhere.
        await client.post(GENERATE, text="x", prompt_stream_id="a")
        assert engines[0].requests == []


async def test_requests_leave_a_vanished_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to it get no answer, as if a network dropped them."""
    engines = [FakeEngine(), FakeEngine()]
    gone: list[str] = []
    probes = 0
    send = Connections._send

    async def drop(self: Connections, method: str, url: str, *rest: Any) -> Any:
        nonlocal probes
        if not any(map(url.startswith, gone)):
            return await send(self, method, url, *rest)
        if url.endswith("/health/ready"):
            probes += 1
            await anyio.sleep_forever()
        raise EngineLost("no connection in time", reached=False)

    monkeypatch.setattr(Connections, "_send", drop)
    monkeypatch.setitem(Connections.ask.__kwdefaults__, "seconds", 0.5)
    policy = InTurn()
    async with routing(*engines, policy=policy) as client, anyio.create_task_group() as group:
        gone.append(next(iter(policy.engines)))
        for _ in range(10):
            group.start_soon(partial(client.post, GENERATE, text="x"))
    assert probes == 1 and sorted(len(engine.requests) for engine in engines) == [0, 10]


async def test_other_refusals_are_passed_on() -> None:
    """An engine whose weights are changed refuses streams, too; it takes other requests."""
    engine = FakeEngine("a")
    engine.refuses = {("POST", STREAMS)}
    async with routing(engine) as client:
        status, error = await client.refused("POST", STREAMS, {"text": "x"}, KEY)
        assert status == 503 and error["code"] == "draining"
        await client.post(GENERATE, text="x")


async def test_no_stream_follows_through_a_router() -> None:
    """The call may be on another engine."""
    async with routing(FakeEngine(), FakeEngine()) as client:
        _, content = await client("GET", "/flashmoa/info", headers=KEY)
        assert json.loads(content)["capabilities"] == ["calls"]


ROUTES = [
    *[("POST", path) for path in (*POLICY_ROUTES, "/render", "/tokenize")],
    *[("POST", f"{STREAMS}/a/{what}") for what in ("append", "keep_alive")],
    *[(method, f"{STREAMS}/a") for method in ("GET", "DELETE")],
    *[("GET", path) for path in ("/flashmoa/info", "/v1/models", "/model_info", "/server_info")],
]


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}])
async def test_every_route_refuses_a_wrong_api_key(headers: dict[str, str]) -> None:
    engine, body = FakeEngine("a"), {"text": "x", "prompt_stream_id": "a"}
    async with routing(engine) as client:
        # Now the router knows the stream and the prompt.
        for path in (STREAMS, GENERATE):
            await client.post(path, **body)
        known = list(engine.requests)
        for method, path in ROUTES:
            assert (await client(method, path, body, headers))[0] == 401, path
        assert engine.requests == known
        # The router still knows the engine of the stream.
        assert (await client("GET", f"{STREAMS}/a", headers=KEY))[0] == 200
        assert engine.requests == [*known, f"GET {STREAMS}/a"]


async def test_the_shell_router_refuses_a_wrong_api_key() -> None:
    engine, parts = FakeEngine("a"), [{"type": "agent", "agent": "absent"}]
    messages = [{"role": "user", "content": parts}]
    # It does not wait for an agent first.
    async with pair(engine, 60) as client:
        with anyio.fail_after(10):
            for method, path in [*ROUTES, ("GET", "/anything")]:
                assert (await client(method, path))[0] == 401, path
            for body in ({"messages": messages}, {"agent": "a", "messages": []}):
                assert (await client("POST", CHAT, body))[0] == 401
        assert engine.requests == []


async def test_router_without_engines_answers_503() -> None:
    async with running(application(RouterOptions(["http://127.0.0.1:9"]))) as client:
        for path in (GENERATE, "/render", STREAMS, "/flashmoa/info", "/health"):
            method = "GET" if path in ("/flashmoa/info", "/health") else "POST"
            status, content = await client(method, path, {"text": "x"})
            assert status == 503 and (path == "/health" or b"no engine answers" in content)


async def test_too_large_body_is_refused() -> None:
    async with routing(FakeEngine(), max_body_bytes=1000) as client:
        status, content = await client("POST", GENERATE, b"x" * 1001, KEY)
        assert status == 413 and b"1000 bytes" in content


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/responses", 404),
        ("PUT", CHAT, 405),
        ("POST", f"{CHAT}/", 404),  # No redirect.
        ("OPTIONS", "/health", 405),
        ("POST", "/flush_cache", 404),  # It is each engine's own.
        ("GET", STREAMS, 405),  # An engine only counts them; nothing names a stream.
    ],
)
async def test_missing_routes_are_refused(method: str, path: str, status: int) -> None:
    engine = FakeEngine("a")
    async with routing(engine) as client:
        found, content = await client(method, path, headers=KEY)
        error = json.loads(content)["error"]
    # Codes are words elsewhere, so they are texts here.
    assert (found, error["code"]) == (status, str(status)) and engine.requests == []
    assert f"no {method} {path}; ask an engine itself" in error["message"]


@pytest.mark.parametrize("path", ["%2F@127.0.0.1:9/x", "%2Fgenerate"])
async def test_a_path_cannot_change_the_host(any_router: RouterClient, path: str) -> None:
    status, content = await any_router("POST", path, b'{"text": "x"}')
    assert status == 404 and b"the router has no POST /" in content


TEXTS = st.just("half of a pair: \ud83d") | st.text(max_size=20)
SCALARS = st.sampled_from([None, True, 0, -1, 1 << 70, 1.5, float("nan"), "", "a", "x" * 160])
NAMES = st.sampled_from(["text", "agent", "input_ids", "role", "content", "n"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS | TEXTS | st.lists(st.integers(-1, 1 << 33), max_size=40),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(NAMES, inner, max_size=3)
        | st.just({"type": "agent", "agent": "a"})
    ),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        *("text", "prompt", "input", "input_ids", "query", "items", "documents", "messages"),
        *("cache_salt", "extra_key", "workflow", "agent", "stream", "n", "sampling_params"),
        *("tools", "prompt_stream_id", "add_special_tokens"),
    ]
)
OBJECTS = st.dictionaries(FIELDS, VALUES, min_size=2, max_size=6)
BODIES = (OBJECTS | VALUES).map(json.dumps).map(str.encode) | OBJECTS.map(
    lambda fields: json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")
)
# A web server accepts these characters in a header.
HEADER = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"))


@pytest.fixture(params=["router", "tokenizing", "shell"])
async def any_router(request: pytest.FixtureRequest) -> AsyncGenerator[RouterClient]:
    engine = FakeEngine("a", needs_key=False)
    if request.param == "tokenizing":
        engine.advertise("tcp://127.0.0.1:9")
    async with own_task(pair(engine) if request.param == "shell" else routing(engine)) as client:
        yield client


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_deep_bodies_are_passed_on_or_refused(any_router: RouterClient, path: str) -> None:
    for depth in (200, *range(900, 1000, 3), 10_000):
        deep = "[" * depth + "]" * depth
        body = f'{{"messages": [{deep}], "tools": {deep}, "text": "x"}}'.encode()
        status, content = await any_router("POST", path, body)
        assert status == 200 or (status == 400 and b"too deeply" in content), depth


@pytest.mark.slow
@settings(
    deadline=None,
    max_examples=300,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    route=st.sampled_from([*ROUTES, ("GET", "/metrics"), ("GET", "/health"), ("POST", "/a")]),
    name=st.binary(max_size=8).map(quote) | st.sampled_from(["a", "x"]),
    body=BODIES | st.tuples(BODIES, st.integers(0, 50)).map(lambda cut: cut[0][: cut[1]]),
    query=st.binary(max_size=8),
    header=HEADER.map(str.strip),
)
async def test_no_request_makes_a_router_fail(
    any_router: RouterClient,
    route: tuple[str, str],
    name: str,
    body: bytes,
    query: bytes,
    header: str,
) -> None:
    path = re.sub("(?<=/)a(?=/|$)", name or "x", route[1])
    headers = {"host": header, "authorization": header}
    status, content = await any_router(route[0], path, body, headers, query)
    assert 200 <= status < 500
    # The fake engine accepts every body, and no agent writes an answer.
    if status in (400, 424):
        assert len(json.loads(content)["error"]["message"]) > 10


async def test_a_router_keeps_nothing_of_requests() -> None:
    engine = FakeEngine("s1", needs_key=False)

    async with routing(engine) as client:

        async def ask(number: int) -> None:
            # Prompts shorter than a block are in no table.
            messages = [{"role": "user", "content": f"Go {number}."}]
            await client.post("/v1/chat/completions", None, messages=messages)
            await client.post("/prompt_streams", None, text=f"{number}")
            for stream in ("s1", f"gone{number}"):
                await client.post("/generate", None, text=f"{number}", prompt_stream_id=stream)
            assert (await client("DELETE", "/prompt_streams/s1"))[0] == 200
            for path in (f"/prompt_streams/gone{number}", f"/nothing/{number}"):
                assert (await client("GET", path))[0] == 404
            engine.requests.clear()

        assert await kept_by(ask) < 3
