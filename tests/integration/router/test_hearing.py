"""Test that clients of a router hear what their calls write on its engines."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.engine.local import LocalEngine, LocalEngines
from flashmoa.router.forwarding import CHAT
from flashmoa.router.shell.application import ShellOptions
from tests.event_loop import own_task
from tests.integration.ears import Ear, in_flight, listening, text_of
from tests.integration.router.conftest import make_options, serve_router
from tests.integration.router.http_calls import chat, metric, read, wait_for_metric
from tests.integration.router.serving import InTurn
from tests.integration.support import Words
from tests.waiting import until

ENGINE, DOWNSTREAM = 0, 1


async def ask(http: httpx.AsyncClient, body: dict[str, Any], call: str) -> httpx.Response:
    return await http.post(CHAT, json=body, headers={"X-Request-Id-FlashMoA": call})


async def answer(http: httpx.AsyncClient, body: dict[str, Any], call: str) -> str:
    response = await ask(http, body, call)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


@pytest.fixture
async def direct(
    engine: LocalEngine, downstream: LocalEngine
) -> AsyncGenerator[list[httpx.AsyncClient]]:
    """Clients of the two engines, which nobody hears at the end."""
    async with AsyncExitStack() as stack:
        urls = (engine.url, downstream.url)
        clients = [httpx.AsyncClient(base_url=url, timeout=60) for url in urls]
        for http in clients:
            await stack.enter_async_context(http)
        yield clients
        await wait_for_channels(clients, 0, 0)


async def wait_for_channels(direct: list[httpx.AsyncClient], *expected: int) -> None:
    with anyio.fail_after(20):
        while tuple([(await in_flight(http))["channels"] for http in direct]) != expected:  # noqa: ASYNC110
            await anyio.sleep(0.02)


@pytest.fixture
async def in_turn(engine: LocalEngine, downstream: LocalEngine) -> AsyncGenerator[Any]:
    """A client of a router that sends calls to the two engines in turn."""
    async with own_task(serve_router(make_options(engine, downstream, policy=InTurn()))) as router:
        yield router


async def test_calls_on_several_engines_are_heard_as_each_engine_tells_them(
    in_turn: httpx.AsyncClient, direct: list[httpx.AsyncClient], words: Words
) -> None:
    assert "calls" in (await in_turn.get("/flashmoa/info")).json()["capabilities"]
    async with listening(in_turn) as ear, listening(direct[ENGINE]) as reference:
        bodies = {ear.name_call(): chat(words(20, 100 + n), max_tokens=60) for n in range(8)}
        answers: dict[str, str] = {}

        async def call(call_id: str, body: dict[str, Any]) -> None:
            answers[call_id] = await answer(in_turn, body, call_id)

        async with anyio.create_task_group() as group:
            for call_id, body in bodies.items():
                group.start_soon(call, call_id, body)
        await wait_for_channels(direct, 2, 1)
        for call_id, body in bodies.items():
            heard = await ear.until_end(call_id)
            other = reference.name_call()
            await answer(direct[ENGINE], body, other)
            told = await reference.until_end(other)
            assert text_of(heard) == text_of(told) == answers[call_id]
            assert heard[-1] == told[-1]
    for http in (in_turn, *direct):
        assert (await http.get("/flashmoa/calls")).status_code == 400


async def test_a_router_listens_to_an_engine_while_it_must(
    in_turn: httpx.AsyncClient, direct: list[httpx.AsyncClient], words: Words
) -> None:
    body = chat(words(20, 120), max_tokens=40)
    first, second = sorted(direct, key=lambda http: f"{http.base_url}")
    async with listening(in_turn) as ear:
        for opened in ((1, 0), (1, 1), (1, 1)):
            call = ear.name_call()
            await answer(in_turn, body, call)
            await wait_for_channels([first, second], *opened)
        # A call without a header, or of a client that does not listen.
        await answer(in_turn, body, "")
        await answer(in_turn, body, Ear().name_call())
        await ear.until_end(call)
    await wait_for_channels(direct, 0, 0)


async def test_a_channel_that_is_opened_again_hears_the_calls_in_flight(
    in_turn: httpx.AsyncClient, direct: list[httpx.AsyncClient], words: Words
) -> None:
    older, newer = Ear(), Ear()
    newer.channel = older.channel
    call = older.name_call()
    answers: list[str] = []
    ended = anyio.Event()

    async def listen() -> None:
        await older.listen(in_turn)
        ended.set()

    async def write() -> None:
        answers.append(await answer(in_turn, chat(words(20, 130), max_tokens=600), call))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as listeners:
            async with anyio.create_task_group() as group:
                group.start_soon(write)
                while not any([(await in_flight(http))["requests"] for http in direct]):  # noqa: ASYNC110
                    await anyio.sleep(0.005)
                # The call began before there was a channel, and is told from its beginning.
                listeners.start_soon(listen)
                while not older.heard[call]:  # noqa: ASYNC110
                    await anyio.sleep(0.005)
                listeners.start_soon(newer.listen, in_turn)
                await ended.wait()
                await newer.until_end(call)
            listeners.cancel_scope.cancel()
    first, then = older.heard[call], [event for event in newer.heard[call] if "content" in event]
    assert answers[0].startswith(text_of(first))
    # Text that was on its way meanwhile is lost.
    at = then[0]["at"]
    assert at >= len(text_of(first))
    assert "".join(event["content"] for event in then) == answers[0][at:]


@pytest.mark.slow
async def test_a_channel_outlives_an_engine(
    engines: LocalEngines, model: Path, engine: LocalEngine, words: Words
) -> None:
    answers: dict[str, httpx.Response] = {}

    async def write(call: str) -> None:
        answers[call] = await ask(router, chat(words(20, 140), max_tokens=600), call)

    async def check() -> None:
        call = ear.name_call()
        text = await answer(router, chat(words(20, 141), max_tokens=40), call)
        assert text_of(await ear.until_end(call)) == text

    arguments = ["--max-total-tokens", "12000"]
    mortal = await engines.start(model, core=1, arguments=arguments)
    url = mortal.url
    try:
        async with (
            serve_router(make_options(mortal, engine, policy=InTurn())) as router,
            listening(router) as ear,
        ):
            calls = [ear.name_call() for _ in range(2)]
            async with anyio.create_task_group() as group:
                for call in calls:
                    group.start_soon(write, call)
                await until(lambda: all(ear.heard[call] for call in calls))
                await mortal.stop()
            lost, kept = sorted(calls, key=lambda call: -answers[call].status_code)
            assert [answers[call].status_code for call in (lost, kept)] == [502, 200]
            text = answers[kept].json()["choices"][0]["message"]["content"]
            assert text_of(await ear.until_end(kept)) == text
            await check()
            # An engine that starts at the old address is heard again.
            mortal = await engines.start(
                model, core=1, arguments=[*arguments, "--port", url.rpartition(":")[2]], wait=False
            )
            await wait_for_metric(router, f'flashmoa_router_engine_up{{engine="{url}"}}')
            answered = f'flashmoa_router_requests_total{{ending="answered",engine="{url}"}}'
            before = await metric(router, answered)
            for _ in range(2):
                await check()
            assert await metric(router, answered) > before
    finally:
        await mortal.stop()


async def test_agents_that_read_each_other_are_heard(
    engine: LocalEngine, direct: list[httpx.AsyncClient], words: Words
) -> None:
    async with serve_router(ShellOptions(engine.url, engine.url, decode=[engine.url])) as shell:
        assert "calls" in (await shell.get("/flashmoa/info")).json()["capabilities"]
        async with listening(shell) as ear:
            texts: dict[str, str] = {}

            async def write(agent: str, content: Any) -> None:
                call = ear.name_call()
                body = chat(content, max_tokens=60, workflow="w", agent=agent)
                texts[agent] = await answer(shell, body, call)
                assert text_of(await ear.until_end(call)) == texts[agent]

            async with anyio.create_task_group() as group:
                group.start_soon(write, "critic", [read("planner")])
                group.start_soon(write, "planner", words(20, 150))
            await wait_for_channels(direct, 1, 0)
    async with serve_router(ShellOptions(engine.url, engine.url)) as shell:
        headers = {"X-FlashMoA-Channel": ear.channel}
        refused = await shell.get("/flashmoa/calls", headers=headers)
        assert refused.status_code == 404 and "--decode" in refused.text
