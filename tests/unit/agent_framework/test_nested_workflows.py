"""Test that workflows within a linked workflow are not run by dry runs; no engine."""

from __future__ import annotations

from typing import Any

import pytest
from agent_framework import Agent, Workflow
from agent_framework.orchestrations import SequentialBuilder

from flashmoa.agent_framework import FlashMoAChatClient, link
from tests.unit.agent_framework.fakes import agent, chain, make_client, run_linked

pytestmark = pytest.mark.anyio


def inner(client: FlashMoAChatClient) -> Workflow:
    return SequentialBuilder(participants=[agent(client, "i"), agent(client, "j")]).build()


def as_agent(client: FlashMoAChatClient) -> Any:
    return inner(client).as_agent(name="b")


def in_agent(client: FlashMoAChatClient) -> Any:
    """Make an agent that holds a workflow as an attribute, but is none."""

    class Holder(Agent[Any]):
        inner: Workflow

    holder = Holder(client, name="b")
    holder.inner = inner(client)
    return holder


@pytest.mark.parametrize("nest", [as_agent, in_agent])
async def test_a_nested_workflow_is_never_run_on_a_copy(nest: Any) -> None:
    client, fake = make_client()
    await chain(client, nest(client)).run("task")
    unlinked = [sent.prompt for sent in fake.sent]
    fake.sent.clear()
    reasons = await run_linked(chain(client, nest(client)))
    assert [sent.prompt for sent in fake.sent] == unlinked
    assert len(reasons) == 1 and "it runs a workflow" in reasons[0]


async def test_an_agent_that_asks_for_approval_is_never_run_on_a_copy() -> None:
    """``with_request_info`` makes a workflow of the agent."""
    client, fake = make_client()
    builder = SequentialBuilder(participants=[agent(client, "a"), agent(client, "b")])
    reasons = await run_linked(builder.with_request_info(agents=["b"]).build())
    assert len(fake.sent) == 2 and "You are b" in fake.sent[-1].prompt
    assert len(reasons) == 1 and "it runs a workflow" in reasons[0]


async def test_the_workflow_within_is_linked_if_it_is_linked_itself() -> None:
    client, fake = make_client()
    nested = inner(client)
    outer = chain(client, nested.as_agent(name="b"))
    link(nested)
    await run_linked(outer)
    assert [sent.status for sent in fake.sent] == [None, None, "hit"]
