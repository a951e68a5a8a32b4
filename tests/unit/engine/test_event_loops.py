"""A client outlives event loops: each has connections of its own, and gives them back."""

import asyncio
import gc
import json
import ssl
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flashmoa._concurrency import all_of
from flashmoa.engine import EngineClient, connections
from flashmoa.openai import AsyncOpenAI
from tests.unit.engine.web_server import WebServer, web_server


@pytest.fixture
def engine() -> Generator[WebServer]:
    """Return an engine that renders every prompt."""
    with web_server(b'{"text": "hi."}') as server:
        yield server


async def ask(client: EngineClient) -> str:
    return await client.render([{"role": "user", "content": "Hello."}])


@pytest.mark.parametrize("is_openai", [False, True])
def test_a_client_is_used_in_several_loops(engine: WebServer, is_openai: bool) -> None:
    client = EngineClient(engine.url)
    openai = AsyncOpenAI(base_url=engine.url, max_retries=0)

    async def ask_once() -> str:
        if not is_openai:
            return await ask(client)
        create = openai.chat.completions.with_raw_response.create
        return json.loads((await create(model="m", messages=[])).text)["text"]

    async def ask_often() -> list[str]:
        return await all_of([ask_once] * 3) + [await ask_once()]

    for loops in (1, 2, 3):
        assert asyncio.run(ask_often()) == ["hi."] * 4
        # Within a loop a connection is used again, and no loop leaves one behind.
        assert engine.has_connections(0)
        assert (engine.requests, engine.opened) == (4 * loops, 3 * loops)
    asyncio.run(client.close())
    asyncio.run(openai.close())


def test_an_openai_client_checks_certificates() -> None:
    transport: Any = AsyncOpenAI(base_url="http://engine")._client._transport
    assert transport._verify.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_loop_may_end_without_closing_generators(engine: WebServer) -> None:
    client = EngineClient(engine.url)
    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(ask(client)) == "hi."
    loop.close()
    assert asyncio.run(ask(client)) == "hi."
    asyncio.run(client.close())
    # Python closes what no loop can close any more.
    del loop
    gc.collect()
    assert engine.has_connections(0)


def test_closing_frees_connections_of_other_loops(engine: WebServer) -> None:
    client = EngineClient(engine.url)
    asked = threading.Event()

    async def main() -> None:
        assert await ask(client) == "hi."
        asked.set()
        # A wait in another thread, so that this loop runs until the connections are back.
        assert await asyncio.to_thread(engine.has_connections, 0)

    async def ask_and_close() -> None:
        assert await ask(client) == "hi."
        assert engine.has_connections(2)
        await client.close()

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(lambda: asyncio.run(main()))
        assert asked.wait(5)
        asyncio.run(ask_and_close())
        other.result(5)


def test_a_closed_client_opens_no_connection(engine: WebServer) -> None:
    client = EngineClient(engine.url)
    asyncio.run(ask(client))
    asyncio.run(client.close())
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(ask(client))
    assert engine.opened == 1


def test_a_proxy_of_the_environment_is_used(
    engine: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", engine.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    client = EngineClient("http://no-such-host.invalid")
    assert [asyncio.run(ask(client)) for _ in range(2)] == ["hi."] * 2
    asyncio.run(client.close())


@pytest.mark.parametrize(
    ("host", "excepted"),
    [
        ("127.0.0.1:8", "127.0.0.1:8"),
        ("127.0.0.1:8", "x.org,127.0.0.1"),
        ("127.0.0.1:8", "*"),
        ("[::1]:30000", "::1"),
        ("localhost:30000", "localhost"),
    ],
)
def test_an_excepted_host_has_no_proxy(
    host: str, excepted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "proxy.invalid:3128")
    monkeypatch.setenv("NO_PROXY", excepted)
    monkeypatch.delenv("no_proxy", raising=False)
    assert connections._proxy_of(f"http://{host}") is None
    if excepted != "*":
        assert connections._proxy_of("http://other:30000") == "http://proxy.invalid:3128"


def test_certificates_are_read_once() -> None:
    contexts = {
        id(EngineClient(f"https://engine-{number}")._http._transport._verify)  # type: ignore[attr-defined]
        for number in range(2)
    }
    assert len(contexts) == 1
