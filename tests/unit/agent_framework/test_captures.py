"""Test where a dry run ends, and what becomes of requests of tasks that it started; no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from agent_framework import AgentExecutorResponse, Workflow
from agent_framework.orchestrations import ConcurrentBuilder

from flashmoa.agent_framework import FlashMoAChatClient
from tests.unit.agent_framework.fakes import ANSWER, FakeEngine, agent, make_client, run_linked

pytestmark = pytest.mark.anyio

Merge = Callable[[list[AgentExecutorResponse]], Awaitable[str]]
IN_OTHER_TASK = "it calls its model in a task of its own"


def panel(merge: Merge, client: FlashMoAChatClient) -> Workflow:
    experts = [agent(client, name) for name in "ab"]
    return ConcurrentBuilder(participants=experts).with_aggregator(merge).build()


async def test_a_worker_that_a_dry_run_started_serves_the_real_run() -> None:
    """The worker inherits the context of the dry run and outlives it."""
    client, fake = make_client()
    editor = agent(client, "editor")
    worker: list[asyncio.Task[None]] = []
    orders: asyncio.Queue[tuple[str, asyncio.Future[str]]] = asyncio.Queue()

    async def work() -> None:
        while True:
            text, answer = await orders.get()
            try:
                answer.set_result((await editor.run(text)).text)
            except Exception as error:
                answer.set_exception(error)

    async def merge(results: list[AgentExecutorResponse]) -> str:
        if not worker:
            worker.append(asyncio.create_task(work()))
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        await orders.put((" ".join(each.agent_response.text for each in results), answer))
        return await answer

    workflow = panel(merge, client)
    reasons = await run_linked(workflow, "merge")
    worker[0].cancel()
    assert [IN_OTHER_TASK in reason for reason in reasons] == [True]
    assert len(fake.sent) == 3 and "editor" in fake.sent[-1].prompt


async def gather(editor: Any, texts: list[str]) -> str:
    return " ".join([each.text for each in await asyncio.gather(*map(editor.run, texts))])


async def in_task_group(editor: Any, texts: list[str]) -> str:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(editor.run(text)) for text in texts]
    return " ".join(task.result().text for task in tasks)


@pytest.mark.parametrize("ask", [gather, in_task_group])
async def test_an_aggregator_that_asks_in_child_tasks_is_declined_for_good(ask: Any) -> None:
    """Such calls cannot be attributed to it, so no link to it would ever be used."""
    client, fake = make_client()
    editor = agent(client, "editor")
    ran: list[int] = []

    async def merge(results: list[AgentExecutorResponse]) -> str:
        ran.append(1)
        return await ask(editor, [each.agent_response.text for each in results])

    reasons = await run_linked(panel(merge, client), "merge", runs=2)
    assert len(reasons) == 1 and IN_OTHER_TASK in reasons[0]
    assert len(fake.sent) == 8 and all(sent.streamed is None for sent in fake.sent)
    assert len(ran) == 3  # Twice in the runs, and once on a copy.


async def test_an_aggregator_that_asks_within_a_task_group_is_linked() -> None:
    client, fake = make_client()
    editor = agent(client, "editor")

    async def merge(results: list[AgentExecutorResponse]) -> str:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))
            return (await editor.run(results[0].agent_response.text)).text

    assert await run_linked(panel(merge, client), "merge") == []
    assert_editor_hit(fake)


def assert_editor_hit(fake: FakeEngine) -> None:
    assert fake.sent[-1].status == "hit"
    assert fake.sent[-1].prompt == f"<system>You are editor.<user>{ANSWER}<assistant>"
