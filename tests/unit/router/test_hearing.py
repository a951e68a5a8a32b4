"""Test how the lines of several engines become one channel."""

import json
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, MutableMapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import anyio
import httpx
import pytest

from flashmoa.engine.local import free_port
from flashmoa.router import hearing
from flashmoa.router.application import application
from flashmoa.router.engines import RouterOptions
from flashmoa.router.forwarding import Connections, EngineLost, ForwardedRequest
from flashmoa.router.hearing import CALLS, HeardChannels
from tests.integration.router.serving import InTurn, serve
from tests.unit.router.support import CHANNEL, KEY, LISTENING, FakeEngine, pair, routing

HEADERS = {**KEY, "x-flashmoa-channel": CHANNEL}
CALL = {**KEY, "x-request-id-flashmoa": CHANNEL + "0" * 16}
OPEN = ForwardedRequest("GET", CALLS, CALLS, HEADERS, b"")


@asynccontextmanager
async def router_of(*engines: FakeEngine) -> AsyncGenerator[httpx.AsyncClient]:
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serve(engine.app())) for engine in engines]
        options = RouterOptions(urls, api_key="right", policy=InTurn(), watch_seconds=60)
        url = await stack.enter_async_context(serve(application(options)))
        yield await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))
        for engine in engines:
            engine.hangs_up.set()


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_lines_arrive_whole_and_in_order(size: int) -> None:
    engines: list[FakeEngine] = []
    for engine in range(2):
        lines = [b'{"call":"%d","at":%d}\n%s' % (engine, at, b"\n" * (at % 2)) for at in range(5)]
        text = b"".join(lines)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        engines.append(FakeEngine(tells=pieces))
    heard: dict[str, list[int]] = {"0": [], "1": []}
    with anyio.fail_after(20):
        async with router_of(*engines) as router:
            async with router.stream("GET", CALLS, headers=HEADERS) as channel:
                received = channel.aiter_lines()
                assert await anext(received) == LISTENING.decode().strip()
                for _ in engines:
                    await router.post("/generate", json={"text": "x"}, headers=CALL)
                while [len(each) for each in heard.values()] != [5, 5]:
                    if line := await anext(received):
                        event = json.loads(line)
                        heard[event["call"]].append(event["at"])
            for engine in engines:
                await engine.left.wait()
    assert list(heard.values()) == [[0, 1, 2, 3, 4]] * 2


class ScriptedConnections(Connections):
    """Answers each request for a channel with some lines, and a status or an error."""

    def __init__(self, ending: int | EngineLost | None, *lines: bytes) -> None:
        super().__init__(cast("Any", None))
        self._ending = ending
        self._lines = lines
        self.asked = 0
        self.left = 0

    async def read_lines(
        self, url: str, headers: Mapping[str, str], receive: Callable[[Sequence[bytes]], None]
    ) -> int:
        self.asked += 1
        try:
            for line in self._lines:
                await anyio.lowlevel.checkpoint()
                receive([line])
            if self._ending is None:
                await anyio.sleep_forever()
            if isinstance(self._ending, EngineLost):
                raise self._ending
            return cast("int", self._ending)
        finally:
            self.left += 1


class Client:
    """Has one channel, and reads from it once ``reads`` is set."""

    def __init__(self) -> None:
        self.read = b""
        self.reads = anyio.Event()

    @asynccontextmanager
    async def listening(self, channels: HeardChannels) -> AsyncGenerator[None]:
        async with anyio.create_task_group() as group:
            group.start_soon(channels.open(OPEN), {"type": "http"}, self._receive, self._send)
            await anyio.wait_all_tasks_blocked()
            yield
            group.cancel_scope.cancel()

    async def _receive(self) -> dict[str, Any]:
        await anyio.sleep_forever()
        raise AssertionError

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message.get("body"):
            await self.reads.wait()
            self.read += message["body"]


@pytest.mark.parametrize(
    ("ending", "asked"), [(None, 1), (404, 1), (503, 2), (200, 2), (EngineLost("it broke"), 2)]
)
async def test_an_engine_that_may_tell_is_asked_again(
    ending: int | EngineLost | None, asked: int
) -> None:
    connections, client = ScriptedConnections(ending), Client()
    channels = HeardChannels(connections)
    async with client.listening(channels):
        for _ in range(2):
            with channels.calling(CALL, "e"):
                await anyio.wait_all_tasks_blocked()
        assert connections.asked == asked
        # The channel is open all the same.
        client.reads.set()
        await anyio.wait_all_tasks_blocked()
        assert client.read == LISTENING
    assert connections.left == connections.asked


async def test_a_client_must_read_its_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "_MAX_WAITING_BYTES", 1000)
    connections, client = ScriptedConnections(None, *[b"x" * 99] * 20), Client()
    channels = HeardChannels(connections)
    async with client.listening(channels):
        with channels.calling(CALL, "e", "f"):
            await anyio.wait_all_tasks_blocked()
            assert connections.left == 2
        with channels.calling(CALL, "e"):
            await anyio.wait_all_tasks_blocked()
            assert connections.asked == 2
        client.reads.set()
        await anyio.wait_all_tasks_blocked()
        assert client.read.split() == [LISTENING.strip()] and not channels._open


async def test_the_newer_channel_of_an_id_hears_calls() -> None:
    connections = ScriptedConnections(None, b"line")
    channels = HeardChannels(connections)
    older, newer = Client(), Client()
    for client in (older, newer):
        client.reads.set()
    with channels.calling(CALL, "e"), channels.calling(CALL, "e"):
        async with older.listening(channels):
            assert older.read == LISTENING + b"line\n"
            async with newer.listening(channels):
                assert newer.read == LISTENING + b"line\n"
                assert (connections.asked, connections.left) == (2, 1)
    assert not channels._open and not channels._calls


async def test_who_has_no_key_gets_no_channel() -> None:
    named = {"x-flashmoa-channel": CHANNEL}
    async with routing(FakeEngine()) as client:
        assert (await client("GET", CALLS, headers=named))[0] == 401
        for channel in ("", "x" * 16, CHANNEL * 2):
            headers = {**KEY, "x-flashmoa-channel": channel}
            status, content = await client("GET", CALLS, headers=headers)
            assert status == 400 and b"16 hexadecimal digits" in content
    for decodes, headers, status in (True, named, 401), (False, HEADERS, 404):
        async with pair(FakeEngine(), decodes=decodes) as client:
            assert (await client("GET", CALLS, headers=headers))[0] == status


async def test_a_router_ends_while_a_client_listens() -> None:
    engine, port = FakeEngine(needs_key=False), free_port()
    command = [sys.executable, "-c", "from flashmoa.cli import main; main()", "router"]
    async with (
        serve(engine.app()) as url,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        options = ["--engine", url, "--port", str(port)]
        async with await anyio.open_process([*command, *options], stderr=None) as router:
            assert router.stdout is not None
            with anyio.fail_after(30):
                assert b"behind" in await router.stdout.receive()
                while not await answers(client):  # noqa: ASYNC110 - it sends no event
                    await anyio.sleep(0.02)
                async with client.stream("GET", CALLS, headers=HEADERS) as channel:
                    lines = channel.aiter_lines()
                    await anext(lines)
                    await client.post("/generate", json={"text": "x"}, headers=CALL)
                    router.terminate()
                    assert not any([line async for line in lines])
                await router.wait()
            await engine.left.wait()


async def answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.TransportError:
        return False
