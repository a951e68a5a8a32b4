"""Test routers whose engines die, come back or hang."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.stapled import MultiListener

from flashmoa.engine.local import LocalEngine, LocalEngines
from flashmoa.router.application import RouterOptions
from flashmoa.router.policies import RoundRobin
from tests.integration.router.conftest import make_options, serve_router
from tests.integration.router.http_calls import generated, generation, metric, wait_for_metric

pytestmark = pytest.mark.anyio
Words = Callable[[int, int], str]


async def test_other_engine_serves_when_one_dies(
    engines: LocalEngines, model: Path, engine: LocalEngine, words: Words
) -> None:
    async with serve_router(
        make_options(engine, LocalEngine(0, 9, model), policy=RoundRobin())
    ) as router:
        # The second engine never existed.
        await generated(router, words(20, 990))
    mortal = await engines.start(model, core=1, arguments=["--max-total-tokens", "12000"])
    try:
        async with serve_router(make_options(mortal, engine, policy=RoundRobin())) as router:
            answers: list[dict[str, Any]] = []

            async def ask(number: int) -> None:
                answers.append(await generated(router, words(30, 1000 + number), tokens=200))

            async with anyio.create_task_group() as group:
                for number in range(4):
                    group.start_soon(ask, number)
                await wait_for_metric(
                    router, f'flashmoa_router_prompt_tokens_total{{engine="{mortal.url}"'
                )
                await mortal.stop()
            # The requests that the engine had were sent to the other one.
            assert len(answers) == 4
            await generated(router, words(30, 1010))
            up = f'flashmoa_router_engine_up{{engine="{mortal.url}"}}'
            assert await metric(router, up) == 0
            # An engine that starts at the old address gets requests again.
            port = mortal.url.rpartition(":")[2]
            mortal = await engines.start(
                model, arguments=["--port", port, "--max-total-tokens", "12000"], wait=False
            )
            await wait_for_metric(router, up)
            for number in range(2):
                await generated(router, words(30, 1020 + number))
            assert await metric(router, up) == 1
    finally:
        await mortal.stop()


class EndingServer:
    """Ends at the first POST like a process: it drops its connections, and then closes its port."""

    def __init__(self, dropped: int) -> None:
        self._left = dropped
        self._ends = False
        self._scope = anyio.CancelScope()

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[str]:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        port = listener.extra(SocketAttribute.local_port)
        async with anyio.create_task_group() as group:
            group.start_soon(self._serve, listener)
            yield f"http://127.0.0.1:{port}"
            self._scope.cancel()

    async def _serve(self, listener: MultiListener[SocketStream]) -> None:
        with self._scope:
            async with listener:
                await listener.serve(self._answer)

    async def _answer(self, client: SocketStream) -> None:
        async with client:
            request = b"" if self._ends else await client.receive()
            if self._ends:
                self._left -= 1
            elif request.startswith(b"POST"):
                self._ends = True
            else:
                await client.send(b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        if self._ends and self._left <= 0:
            self._scope.cancel()


@pytest.mark.parametrize("dropped", [0, 1, 4])
async def test_engine_that_is_ending_gets_no_further_requests(
    engine: LocalEngine, words: Words, dropped: int
) -> None:
    async with EndingServer(dropped).listening() as url:
        several = RouterOptions([url, engine.url], policy=RoundRobin(), watch_seconds=60)
        async with serve_router(several) as router:
            for number in range(2):
                await generated(router, words(10, 1090 + number))
            assert await metric(router, f'flashmoa_router_engine_up{{engine="{url}"}}') == 0


@pytest.mark.slow
async def test_other_engine_serves_when_one_hangs(
    engines: LocalEngines, model: Path, engine: LocalEngine, words: Words
) -> None:
    hanging = await engines.start(model, core=1, arguments=["--max-total-tokens", "12000"])
    up = f'flashmoa_router_engine_up{{engine="{hanging.url}"}}'
    several = make_options(hanging, engine, policy=RoundRobin(), hung_seconds=0.5)
    try:
        async with serve_router(several) as router:
            await wait_for_metric(router, up)
            # Requests are sent until it is the engine's turn.
            sent = f'flashmoa_router_prompt_tokens_total{{engine="{hanging.url}"}}'
            while not await metric(router, sent):
                await generated(router, words(10, 1072))
            await generated(router, words(10, 1072))
            ask, answers, events = generation(words(30, 1070), 2000, stream=True), [], []

            async def stream() -> None:
                async with router.stream("POST", "/generate", json=ask) as answer:
                    async for line in answer.aiter_lines():
                        events.append(line)
                        if len(events) == 1:
                            # The engine now accepts connections and answers none.
                            os.killpg(hanging.pid, signal.SIGSTOP)
                            group.start_soon(wait)
                            group.start_soon(wait)

            async def wait() -> None:
                answers.append(await generated(router, words(30, 1071)))

            async with anyio.create_task_group() as group:
                group.start_soon(stream)
            # The requests without an answer were sent again, and the stream ended with an error.
            assert len(answers) == 2 and answers[0]["text"] == answers[1]["text"]
            assert "The engine is gone" in "".join(events[-2:])
            assert await metric(router, up) == 0
            os.killpg(hanging.pid, signal.SIGCONT)
            await wait_for_metric(router, up)
    finally:
        await hanging.stop()
