"""Test runs that fail, are cancelled, stop early or cannot be linked: they leave nothing behind."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from agent_framework import Workflow
from agent_framework.orchestrations import SequentialBuilder

from flashmoa.agent_framework import FlashMoAChatClient, link
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import CallFailed, Event, LinkClosed
from tests.integration.frameworks.agent_framework.workflows import TASK, Pair, agent, chain, run
from tests.integration.support import wait_until_idle


async def test_a_failed_run_ends_its_links(clients: Pair, guide: str) -> None:
    bad = [agent("planner", clients[0], guide), agent("local", clients[0], guide, tokens=-5)]
    last = agent("summary", clients[1], guide)
    workflow = SequentialBuilder(participants=[*bad, last]).build()
    events: list[Event] = []
    linked = link(workflow, listener=events.append)
    with pytest.raises(Exception, match=r"max_tokens|failed"):
        await workflow.run(TASK)
    await linked.close()
    assert [event.agent for event in events if isinstance(event, CallFailed)] == ["local"]
    closed = {event.agent: event.reason for event in events if isinstance(event, LinkClosed)}
    assert closed["summary"] == "abort"
    for client in clients:
        assert (await wait_until_idle(client.engine)).pinned_streams == 0


async def test_a_run_that_stops_early_leaves_nothing(clients: Pair, guide: str) -> None:
    """Its reader stops after the first agent, so the agents after it are never asked."""
    workflow = chain(clients, guide)
    link(workflow)
    events = workflow.run(TASK, stream=True)
    async for event in events:
        if event.type == "executor_completed" and event.executor_id == "planner":
            break
    del events, event
    for client in clients:
        await wait_until_idle(client.engine)


async def test_a_plain_server_works_with_one_warning(
    plain_engine: LocalEngine,
    guide: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flashmoa.link.prompt_feed._logged", set())
    async with FlashMoAChatClient("tiny", base_url=plain_engine.url) as plain:
        build: Callable[[], Workflow] = lambda: chain((plain, plain), guide)  # noqa: E731
        unlinked = await run(build())
        with caplog.at_level(logging.WARNING, "flashmoa"):
            for _ in range(2):
                workflow = build()
                link(workflow)
                assert await run(workflow) == unlinked
    warnings = [
        record for record in caplog.records if "without the flashmoa-sglang" in record.message
    ]
    assert len(warnings) == 1
