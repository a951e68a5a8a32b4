"""Test that bodies which no engine accepts give an error to their senders and harm no others."""

from __future__ import annotations

import json
from collections import Counter

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from tests.integration.router.conftest import make_options, serve_router
from tests.integration.router.http_calls import chat, generation
from tests.integration.support import wait_until_idle

pytestmark = pytest.mark.anyio
JSON = {"content-type": "application/json"}


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


@pytest.mark.parametrize(
    "inner", ['"half of a pair: \\ud83d"', *(f"{'[' * n}{']' * n}" for n in (300, 970, 5000))]
)
async def test_odd_bodies_are_left_to_the_engine(router: httpx.AsyncClient, inner: str) -> None:
    """It refuses strings that no text can contain, and nesting that it cannot read."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": "ODD"}}}
    for path, body in (
        ("/generate", generation("hello", 1, cache_salt="ODD")),
        ("/v1/chat/completions", chat("hello", max_tokens=1, tools=[tool])),
    ):
        odd = json.dumps(body).replace('"ODD"', inner)
        answer = await router.post(path, content=odd, headers=JSON)
        assert answer.status_code in (200, 400, 500)
        assert (await router.post("/generate", json=generation("hello", 1))).status_code == 200
