"""An engine that does not answer delays neither requests nor closing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken

from flashmoa import EngineClient, Text, Workflow
from flashmoa._concurrency import SingleFlight, TaskHost
from flashmoa.autogen import FlashMoAChatCompletionClient, link
from flashmoa.errors import EngineError
from flashmoa.observe import CallStarted, Event, LinkClosed
from tests.unit.engine.faulty_engine import TEXT
from tests.unit.link.hung_engine import HungEngine, Route, hung_engine
from tests.unit.openai.test_observed_calls import INFO

# Seconds that every operation here may take. A request to an engine that hangs takes 25 s.
SOON = 1.0


@contextmanager
def soon() -> Generator[None]:
    before = anyio.current_time()
    yield
    assert anyio.current_time() - before < SOON


def client_of(engine: HungEngine, **more: Any) -> FlashMoAChatCompletionClient:
    return FlashMoAChatCompletionClient(
        model="m", base_url=engine.url, timeout=25.0, model_info=INFO, max_retries=0, **more
    )


def asks(text: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"Read this: {text}"}]


async def reached(engine: HungEngine, text: Text, times: int = 1) -> None:
    """Wait until ``times`` links to a text hang, or until a piece of the text was appended."""
    routes: tuple[Route, ...] = ("render", "open")
    hanging = next((route for route in routes if route in engine.hangs), None)
    await engine.until(hanging or "open", times)
    if hanging is None:
        text.write("a ")
        await engine.until("append", times)


@pytest.mark.parametrize("hangs", ["render", "open", "append"])
async def test_a_request_does_not_wait_for_a_hung_engine(hangs: Route) -> None:
    events: list[Event] = []
    async with (
        hung_engine(hangs) as engine,
        EngineClient(engine.url, timeout=25.0) as client,
        Workflow(client, listener=events.append) as flow,
    ):
        draft = flow.text("draft")
        answer = flow.ask(asks(draft))
        await reached(engine, draft)
        with soon():
            draft.finish("a plan")
            assert await answer == TEXT
    (started,) = [event for event in events if isinstance(event, CallStarted)]
    assert started.late == (hangs != "append")
    assert (started.stream_id is not None) == (hangs == "append")


async def test_a_link_ends_as_its_engine_does_not_answer() -> None:
    closed = asyncio.Queue[Event]()
    async with (
        hung_engine("append") as engine,
        EngineClient(engine.url, timeout=0.1) as client,
        Workflow(client, listener=closed.put_nowait) as flow,
    ):
        draft = flow.text("draft")
        flow.expect(asks(draft))
        await reached(engine, draft)
        while not isinstance(event := await closed.get(), LinkClosed):
            pass
    assert event.reason.startswith(f"EngineTimeout: {engine.url} did not answer in time")


@pytest.mark.parametrize(
    "hangs", [("render",), ("open",), ("append",), ("delete",), ("open", "delete")]
)
@pytest.mark.parametrize("is_error", [False, True])
async def test_leaving_a_workflow_does_not_wait(hangs: tuple[Route, ...], is_error: bool) -> None:
    async with hung_engine(*hangs) as engine, EngineClient(engine.url, timeout=25.0) as client:
        events: list[Event] = []
        try:
            async with Workflow(client, listener=events.append) as flow:
                draft = flow.text("draft")
                expected = [flow.expect(asks(draft), name=f"e{n}") for n in range(3)]
                await reached(engine, draft, 3)
                if hangs == ("delete",):
                    # The workflow itself releases the stream of a claimed request, too.
                    assert expected[0].claim()
                    with soon():
                        await expected[0].release()
                before = anyio.current_time()
                if is_error:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            assert is_error
        assert anyio.current_time() - before < SOON
        if hangs != ("render",):
            assert len([event for event in events if isinstance(event, LinkClosed)]) == 3


async def test_a_refused_request_does_not_wait() -> None:
    async with hung_engine("delete") as engine, EngineClient(engine.url, timeout=25.0) as client:
        async with Workflow(client) as flow:
            draft = flow.text("draft")
            answer = flow.ask(asks(draft), max_tokens=-1)
            await reached(engine, draft)
            before = anyio.current_time()
            draft.finish("a plan")
            with pytest.raises(EngineError):
                await answer
        assert anyio.current_time() - before < SOON
    assert "delete" in engine.routes()


@pytest.mark.parametrize("hangs", ["render", "open", "delete"])
async def test_closing_linked_teams_does_not_wait(hangs: Route) -> None:
    async with hung_engine("chat") as writing, hung_engine(hangs) as reading:
        writer, reader = client_of(writing), client_of(reading)
        runs: list[asyncio.Future[Any]] = []
        token = CancellationToken()
        for _ in range(4):
            agents = [
                AssistantAgent("writer", model_client=writer),
                AssistantAgent("reviewer", model_client=reader),
            ]
            team = RoundRobinGroupChat(agents, max_turns=2)
            linked = link(team)
            running = team.run(task="Go.", cancellation_token=token)
            runs.append(asyncio.ensure_future(running))
        await reading.until("open" if hangs == "delete" else hangs, 4)
        with soon():
            await linked.close()
        with soon():
            await reader.close()
        token.cancel()
        await asyncio.wait(runs)
        await writer.close()


async def test_work_added_while_a_host_closes_is_done() -> None:
    host, done = TaskHost("work failed"), 0

    async def clean_up() -> None:
        nonlocal done
        with anyio.CancelScope(shield=True):
            await anyio.lowlevel.checkpoint()
        done += 1

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            host.start_cleanup(clean_up)

    for _ in range(3):
        host.start(work)
    await anyio.wait_all_tasks_blocked()
    await host.close()
    assert done == 3


@pytest.mark.filterwarnings("ignore:coroutine 'TaskHost._log_failures' was never awaited")
def test_work_that_ended_with_its_loop_runs_in_the_next() -> None:
    """anyio leaves such work's coroutine to the garbage collector, which warns."""
    done: list[str] = []

    async def work() -> None:
        done.append("work")

    flight = SingleFlight(TaskHost("work failed"), work)

    async def program(steps: int) -> None:
        flight.request()
        for _ in range(steps):
            await anyio.lowlevel.checkpoint()

    asyncio.run(program(0))
    gc.collect()
    assert not flight.is_running and not done
    asyncio.run(program(9))
    assert done == ["work"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_host_is_closed_after_its_loop() -> None:
    host = TaskHost("work failed")

    async def begin() -> None:
        host.start(anyio.sleep_forever)
        await anyio.wait_all_tasks_blocked()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    asyncio.run(host.close())
    assert host.is_closed
