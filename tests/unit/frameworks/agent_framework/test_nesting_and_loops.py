"""Test workflows in workflows, which dry runs do not run, and loops; no engine."""

from typing import Any

import pytest
from agent_framework import (
    Agent,
    AgentExecutor,
    AgentExecutorResponse,
    Executor,
    Workflow,
    WorkflowBuilder,
    WorkflowContext,
    handler,
)
from agent_framework.orchestrations import SequentialBuilder

from flashmoa.agent_framework import FlashMoAChatClient, link
from tests.unit.frameworks.agent_framework.fakes import agent, chain, make_client, run_linked


def inner(client: FlashMoAChatClient) -> Workflow:
    return SequentialBuilder(participants=[agent(client, "i"), agent(client, "j")]).build()


def with_agent(client: FlashMoAChatClient) -> Workflow:
    return chain(client, inner(client).as_agent(name="b"))


def with_holder(client: FlashMoAChatClient) -> Workflow:
    """Give an agent a workflow as an attribute."""

    class Holder(Agent[Any]):
        inner: Workflow

    holder = Holder(client, name="b")
    holder.inner = inner(client)
    return chain(client, holder)


def with_approval(client: FlashMoAChatClient) -> Workflow:
    """``with_request_info`` makes a workflow of an agent."""
    builder = SequentialBuilder(participants=[agent(client, "a"), agent(client, "b")])
    return builder.with_request_info(agents=["b"]).build()


@pytest.mark.parametrize("build", [with_agent, with_holder, with_approval])
async def test_a_nested_workflow_is_never_run_on_a_copy(build: Any) -> None:
    client, fake = make_client()
    await build(client).run("task")
    unlinked = [sent.prompt for sent in fake.sent]
    fake.sent.clear()
    reasons = await run_linked(build(client))
    assert [sent.prompt for sent in fake.sent] == unlinked
    assert len(reasons) == 1 and "it runs a workflow" in reasons[0]


async def test_an_inner_workflow_is_linked_by_itself() -> None:
    client, fake = make_client()
    nested = inner(client)
    outer = chain(client, nested.as_agent(name="b"))
    link(nested)
    await run_linked(outer)
    assert fake.statuses == [None, None, "hit"]


class Judge(Executor):
    """Sends a text back twice, and then yields it."""

    rounds = 0

    @handler
    async def judge(
        self,
        response: AgentExecutorResponse,
        ctx: WorkflowContext[AgentExecutorResponse, str],
    ) -> None:
        self.rounds += 1
        if self.rounds < 3:
            await ctx.send_message(response)
        else:
            await ctx.yield_output(response.agent_response.text)


async def test_a_loop_is_linked_in_each_round() -> None:
    client, fake = make_client()
    writer, reviewer = (AgentExecutor(agent(client, name)) for name in "wr")
    judge = Judge(id="judge")
    builder = WorkflowBuilder(start_executor=writer, output_from=[judge])
    builder.add_edge(writer, reviewer).add_edge(reviewer, judge).add_edge(judge, writer)
    await run_linked(builder.build())
    assert fake.statuses == [None, "hit"] * 3
