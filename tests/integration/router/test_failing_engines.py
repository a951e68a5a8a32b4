"""Test routers whose engines die, come back, or close connections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.router.conftest import make_options, serve_router
from tests.integration.router.http_calls import generated, metric, wait_for_metric
from tests.integration.router.serving import InTurn
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.anyio
Words = Callable[[int, int], str]
JSON = {"content-type": "application/json"}


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


@pytest.mark.slow
async def test_appends_survive_bodies_that_break_other_connections(
    engine: LocalEngine, plain_engine: LocalEngine
) -> None:
    """Stock SGLang answers such a chat with 500, and closes the connection without saying so."""
    answers = Counter[int]()
    # Only one of the two engines has prompt streams.
    async with serve_router(make_options(engine, plain_engine)) as router:
        async with EngineClient(engine.url) as direct:
            stream = await direct.open_stream(text="It begins:")
        is_over = anyio.Event()

        async def spoil() -> None:
            while not is_over.is_set():
                path = "/v1/chat/completions"
                answers[(await router.post(path, content=b"[]", headers=JSON)).status_code] += 1

        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(spoil)
            path = f"/prompt_streams/{stream.id}/append"
            failed: list[str] = []
            for number in range(180):
                answer = await router.post(path, json={"seq": number, "text": " x"})
                if answer.status_code != 200:
                    failed.append(answer.text)
            is_over.set()
        assert failed == [] and set(answers) == {500} and answers[500] > 20
        state = (await router.get(f"/prompt_streams/{stream.id}")).json()
        assert state["next_seq"] == 180
        assert (await router.delete(f"/prompt_streams/{stream.id}")).status_code == 200
    async with EngineClient(engine.url) as watching:
        await wait_until_idle(watching)
