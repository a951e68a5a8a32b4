"""Test runs that fail or stop early: they leave nothing behind."""

import pytest
from agent_framework.orchestrations import SequentialBuilder

from flashmoa.agent_framework import link
from flashmoa.observe import CallFailed, Event, LinkClosed
from tests.integration.frameworks.agent_framework.workflows import TASK, Pair, agent, chain
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
