"""Test links in workflows that reach an executor more than once; no engine."""

from __future__ import annotations

import pytest
from agent_framework import (
    AgentExecutor,
    AgentExecutorResponse,
    Executor,
    WorkflowBuilder,
    WorkflowContext,
    handler,
)

from tests.unit.frameworks.agent_framework.fakes import agent, make_client, run_linked

pytestmark = pytest.mark.anyio


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


async def test_a_writer_and_a_reviewer_in_a_loop_are_linked_in_each_round() -> None:
    client, fake = make_client()
    writer, reviewer = (AgentExecutor(agent(client, name)) for name in "wr")
    judge = Judge(id="judge")
    builder = WorkflowBuilder(start_executor=writer, output_from=[judge])
    builder.add_edge(writer, reviewer).add_edge(reviewer, judge).add_edge(judge, writer)
    await run_linked(builder.build())
    assert [sent.status for sent in fake.sent] == [None, "hit"] * 3
