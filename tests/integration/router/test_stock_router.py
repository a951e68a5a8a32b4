"""Test our router and stock ones in front of the same engines."""

from collections.abc import AsyncGenerator
from typing import Any

import anyio
import httpx
import pytest
from flashmoa_bench.harness import routers
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from flashmoa import Workflow
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.errors import PluginMissing
from flashmoa.router.forwarding import CHAT
from flashmoa.router.shell.application import ShellOptions, shell_application
from tests.integration.ears import listening, text_of
from tests.integration.router.conftest import make_options, serve_router
from tests.integration.router.http_calls import chat, generated, metric
from tests.integration.router.serving import serve
from tests.integration.support import Words, post_json, wait_until_idle

pytestmark = pytest.mark.slow
CALL_HEADER = "X-Request-Id-FlashMoA"
HINT_HEADERS = {f"{CALL_HEADER}-Stream": "a-stream", f"{CALL_HEADER}-Tokens": "17"}


@pytest.fixture(scope="module", params=[routers.STOCK, routers.SMG])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
async def stock(
    name: str, engine: LocalEngine, downstream: LocalEngine
) -> AsyncGenerator[httpx.AsyncClient]:
    async with (
        routers.start_router(name, [engine.url, downstream.url]) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield client


async def served_model(http: httpx.AsyncClient) -> str:
    """Return the model's name, without which smg finds no engine."""
    return (await http.get("/v1/models")).json()["data"][0]["id"]


async def chain(client: EngineClient, writer: EngineClient, words: Words) -> tuple[str, int]:
    """Run two linked agents; return the second one's answer, and the tokens of its stream.

    Args: writer: where the first one is asked.
    """
    greedy = {"temperature": 0, "ignore_eos": True}
    async with Workflow(client) as workflow:
        plan = [{"role": "user", "content": words(60, 2201)}]
        planner = workflow.ask(plan, engine=writer, name="planner", max_tokens=160, **greedy)
        read = [{"role": "user", "content": f"{words(200, 2202)} {planner} {words(5, 2203)}"}]
        critic = workflow.ask(read, name="critic", max_tokens=8, **greedy)
        text = await critic
    assert critic.usage is not None
    return text, critic.usage.streamed_tokens or 0


async def test_links_work_during_traffic_through_a_stock_router(
    stock: httpx.AsyncClient, client: EngineClient, downstream: LocalEngine, words: Words
) -> None:
    texts = [words(40, 2210 + number) for number in range(8)]
    answers: dict[str, dict[str, Any]] = {}

    async def ordinary(text: str) -> None:
        answers[text] = await generated(stock, text, tokens=8)

    async with (
        # On the engine of the planner, streams would wait for its decode steps.
        serve_router(make_options(downstream)) as router,
        EngineClient(str(router.base_url)) as ours,
        EngineClient(str(stock.base_url), model=await served_model(stock)) as theirs,
    ):
        # What the router before this one has left in the cache would not be streamed.
        async with EngineClient(downstream.url) as direct:
            await direct.flush_cache()
        async with anyio.create_task_group() as group:
            for text in texts:
                group.start_soon(ordinary, text)
            linked, streamed = await chain(ours, client, words)
        assert streamed > 200
        # The load of the stock router's requests does not count in ours.
        assert await metric(router, "flashmoa_router_engine_load") == 0
        # Through the stock router alone the same agents run unlinked, with the same answers.
        assert await chain(theirs, theirs, words) == (linked, 0)
        with pytest.raises(PluginMissing):
            await theirs.open_stream(text="hi")
    async with httpx.AsyncClient(base_url=client.url, timeout=60) as direct:
        for text in texts:
            assert answers[text]["text"] == (await generated(direct, text, tokens=8))["text"]


async def test_a_request_with_a_stream_id_gets_its_answer_through_a_stock_router(
    name: str, stock: httpx.AsyncClient, client: EngineClient, words: Words
) -> None:
    """sglang-router drops the id. smg passes it on, if perhaps not to the engine of the stream."""
    text = words(100, 2220)
    stream = await client.open_stream(text=text)
    with_hint = await generated(stock, text, prompt_stream_id=stream.id)
    assert ("prompt_stream" in with_hint["meta_info"]) == (name == routers.SMG)
    assert with_hint["text"] == (await generated(stock, text))["text"]
    await client.delete_stream(stream.id)
    await wait_until_idle(client)


async def test_what_a_stock_router_passes_on_is_heard_at_the_engine(
    name: str, engine: LocalEngine, words: Words
) -> None:
    relay = shell_application(ShellOptions(engine.url, engine.url))
    received: list[dict[str, str]] = []

    async def record(scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == CHAT:
            received.append(dict(Headers(scope=scope)))
        await relay(scope, receive, send)

    async with (
        serve(record) as url,
        routers.start_router(name, [url]) as router,
        httpx.AsyncClient(base_url=router, timeout=60) as stock,
        httpx.AsyncClient(base_url=engine.url, timeout=60) as direct,
        listening(direct) as ear,
    ):
        # So a client hears its calls at the engine, if it knows the engine's address.
        channel = await stock.get("/flashmoa/calls", headers={"X-FlashMoA-Channel": ear.channel})
        assert channel.status_code == 404
        body = chat(words(20, 2230), max_tokens=40, model=await served_model(stock))
        call = ear.name_call()
        stock.headers.update({CALL_HEADER: call, **HINT_HEADERS})
        answer = await post_json(stock, CHAT, body)
        heard = await ear.until_end(call)
        assert text_of(heard) == answer["choices"][0]["message"]["content"]
    (headers,) = received
    assert {header: headers.get(header.lower()) for header in HINT_HEADERS} == HINT_HEADERS
