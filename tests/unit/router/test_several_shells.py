"""Test the shell routers of several pairs, which share agents' answers, on fake engines."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.engine.local import free_port
from flashmoa.router.shell.agent_answers import AgentKey, AgentPromptCache
from flashmoa.router.shell.application import (
    ShellOptions,
    shell_application,
    shells_application,
)
from tests.integration.router.serving import serve, serve_at
from tests.unit.router.fake_engines import KEY, FakeEngine, RouterClient, running

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def shells(
    *engines: FakeEngine, seconds: float = 30
) -> AsyncGenerator[tuple[AgentPromptCache, list[str], list[RouterClient]]]:
    """Run a shell router for each engine. Yield their answers, the engines' URLs, and clients."""
    answers = AgentPromptCache()
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serve(engine.app())) for engine in engines]
        apps = [shell_application(ShellOptions(url, url, seconds), answers) for url in urls]
        clients = [await stack.enter_async_context(running(app)) for app in apps]
        yield answers, urls, clients


def reading(read: str, **more: Any) -> bytes:
    """Return a request that reads an agent's answer."""
    prompt = [{"input_ids": [5]}, {"agent": read}]
    return json.dumps({"prompt": prompt, "workflow": "w", **more}).encode()


@pytest.mark.parametrize(
    ("texts", "status"), [(("yes", "yes"), 200), (("yes", "no"), 424)], ids=["same", "other"]
)
async def test_tokens_cross_only_if_they_are_the_same_text_at_both_pairs(
    texts: tuple[str, str], status: int
) -> None:
    engines = [FakeEngine(text=text) for text in texts]
    async with shells(*engines) as (answers, urls, clients):
        answer = answers.begin(AgentKey(KEY["authorization"], "w", "a"), (), urls[0])
        answer.add("yes", [7, 8])
        answer.close()
        own, _ = await clients[0]("POST", "/generate", reading("a"), KEY)
        given, body = await clients[1]("POST", "/generate", reading("a"), KEY)
    assert (own, given) == (200, status)
    assert (status == 424) == (b"another tokenizer" in body)
    # At the pair that wrote them, nobody is asked what they mean.
    assert engines[0].requests.count("POST /generate") == 1
    assert engines[0].requests.count("POST /detokenize") == 1


async def test_tokens_that_cannot_be_compared_are_not_sent() -> None:
    engine = FakeEngine()
    async with shells(engine) as (answers, _, [client]):
        nowhere = "http://127.0.0.1:9"
        answer = answers.begin(AgentKey(KEY["authorization"], "w", "a"), (), nowhere)
        answer.add("yes", [7, 8])
        answer.close()
        status, body = await client("POST", "/generate", reading("a"), KEY)
    assert status == 424 and b"cannot be compared" in body
    assert "POST /generate" not in engine.requests


async def test_agents_of_two_pairs_that_wait_for_each_other_are_refused() -> None:
    async with (
        shells(FakeEngine(), FakeEngine()) as (answers, _, [first, second]),
        anyio.create_task_group() as group,
    ):
        group.start_soon(partial(first, "POST", "/generate", reading("b", agent="a"), KEY))
        with anyio.fail_after(10):
            while not len(answers):  # noqa: ASYNC110 - it sends no event
                await anyio.sleep(0.01)
        status, body = await second("POST", "/generate", reading("a", agent="b"), KEY)
        group.cancel_scope.cancel()
    assert status == 400 and b"would wait" in body


async def test_each_pair_is_behind_its_own_port() -> None:
    engines = [FakeEngine(), FakeEngine(), FakeEngine()]
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serve(engine.app())) for engine in engines]
        port = free_port(len(engines))
        app = shells_application([ShellOptions(url, url) for url in urls], port)
        ports = range(port, port + len(engines))
        served = await stack.enter_async_context(serve_at(app, ports))
        http = await stack.enter_async_context(httpx.AsyncClient(headers=KEY))
        # The port of the Host header may be that of a proxy.
        await http.get(f"{served[2]}/v1/models", headers={"host": f"router:{port}"})
        await http.get(f"{served[1]}/v1/models")
    assert [engine.requests for engine in engines] == [
        [],
        ["GET /v1/models"],
        ["GET /v1/models"],
    ]
