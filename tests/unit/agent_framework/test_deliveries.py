"""Which executor receives whose messages; no engine."""

from __future__ import annotations

from typing import Any

from agent_framework import (
    Executor,
    Workflow,
    WorkflowBuilder,
    WorkflowContext,
    handler,
)

from flashmoa.agent_framework._link_planner import Delivery, find_deliveries


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

    deliveries = find_deliveries(build(edges))
    assert deliveries == [
        Delivery("a", ("s",)),
        Delivery("b", ("s",)),
        Delivery("c", ("s",)),
        Delivery("d", ("c", "a", "b"), fan_in=True),
    ]
    assert deliveries[-1].make_message(["x", "y", "z"]) == ["x", "y", "z"]
    assert deliveries[0].make_message(["x"]) == "x"


def test_conditional_and_double_deliveries_are_left_out() -> None:
    def edges(builder: WorkflowBuilder, s: Node, a: Node, b: Node, c: Node, d: Node) -> None:
        builder.add_edge(s, a, condition=lambda text: bool(text)).add_edge(s, b)
        builder.add_edge(b, c).add_edge(a, d).add_edge(c, d)

    assert find_deliveries(build(edges)) == [Delivery("b", ("s",)), Delivery("c", ("b",))]
