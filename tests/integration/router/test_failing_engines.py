"""Test routers whose engines die or come back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.stapled import MultiListener

from flashmoa.engine.local import LocalEngine, LocalEngines
from flashmoa.router.engines import RouterOptions
from tests.integration.router.conftest import make_options, serve_router
from tests.integration.router.http_calls import generated, metric, wait_for_metric
from tests.integration.router.serving import InTurn

pytestmark = pytest.mark.anyio
Words = Callable[[int, int], str]


@pytest.mark.slow
async def test_other_engine_serves_when_one_dies(
    engines: LocalEngines, model: Path, engine: LocalEngine, words: Words
) -> None:
    async with serve_router(
        make_options(engine, LocalEngine(0, 9, model), policy=InTurn())
    ) as router:
        # The second engine never existed.
        await generated(router, words(20, 990))
    mortal = await engines.start(model, core=1, arguments=["--max-total-tokens", "12000"])
    try:
        async with serve_router(make_options(mortal, engine, policy=InTurn())) as router:
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
        several = RouterOptions([url, engine.url], policy=InTurn(), watch_seconds=60)
        async with serve_router(several) as router:
            for number in range(2):
                await generated(router, words(10, 1090 + number))
            assert await metric(router, f'flashmoa_router_engine_up{{engine="{url}"}}') == 0
