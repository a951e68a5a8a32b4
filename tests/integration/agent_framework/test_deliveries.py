"""Test which messages each executor of a workflow receives; no engine."""

from __future__ import annotations

from typing import Any

from agent_framework import (
    Executor,
    Workflow,
    WorkflowBuilder,
    WorkflowContext,
    handler,
)

from flashmoa.agent_framework._link_planner import Delivery, deliveries


class Node(Executor):
    @handler
    async def one(self, text: str, ctx: WorkflowContext[str, str]) -> None:
        await ctx.send_message(text)
        await ctx.yield_output(text)

    @handler
    async def several(self, texts: list[str], ctx: WorkflowContext[str, str]) -> None:
        await ctx.send_message("".join(texts))
        await ctx.yield_output("".join(texts))


def build(edges: Any) -> Workflow:
    start, *nodes = (Node(id=name) for name in "sabcd")
    builder = WorkflowBuilder(start_executor=start, output_from=[nodes[-1]])
    edges(builder, start, *nodes)
    return builder.build()


def test_a_fan_in_delivers_messages_in_the_order_of_its_edges() -> None:
    def edges(builder: WorkflowBuilder, s: Node, a: Node, b: Node, c: Node, d: Node) -> None:
        builder.add_fan_out_edges(s, [a, b, c]).add_fan_in_edges([c, a, b], d)

    found = deliveries(build(edges))
    assert found == [
        Delivery("a", ("s",)),
        Delivery("b", ("s",)),
        Delivery("c", ("s",)),
        Delivery("d", ("c", "a", "b"), fan_in=True),
    ]
    assert found[-1].message(["x", "y", "z"]) == ["x", "y", "z"]
    assert found[0].message(["x"]) == "x"


def test_conditional_and_double_deliveries_are_left_out() -> None:
    def edges(builder: WorkflowBuilder, s: Node, a: Node, b: Node, c: Node, d: Node) -> None:
        builder.add_edge(s, a, condition=lambda text: bool(text)).add_edge(s, b)
        builder.add_edge(b, c).add_edge(a, d).add_edge(c, d)

    assert deliveries(build(edges)) == [Delivery("b", ("s",)), Delivery("c", ("b",))]
