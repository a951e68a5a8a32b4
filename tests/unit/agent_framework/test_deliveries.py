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

from flashmoa.agent_framework._workflow_link import Delivery, find_deliveries


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


def test_what_an_executor_sends_that_is_reached_by_two_ways_is_left_out() -> None:
    """It may be reached twice at once, so its receivers get two messages one after the other."""

    def edges(builder: WorkflowBuilder, s: Node, a: Node, b: Node, c: Node, d: Node) -> None:
        builder.add_fan_out_edges(s, [a, b]).add_edge(a, c).add_edge(b, c).add_edge(c, d)

    assert find_deliveries(build(edges)) == [Delivery("a", ("s",)), Delivery("b", ("s",))]


def test_what_comes_after_such_a_receiver_is_left_out_too() -> None:
    def edges(builder: WorkflowBuilder, s: Node, a: Node, b: Node, c: Node, d: Node) -> None:
        builder.add_edge(s, a).add_edge(s, b).add_edge(a, b).add_edge(b, c).add_edge(c, d)

    assert find_deliveries(build(edges)) == [Delivery("a", ("s",))]


def test_a_loop_delivers_each_round_to_those_that_it_does_not_enter() -> None:
    """A round's message has gone around before the next one is sent."""

    def edges(builder: WorkflowBuilder, s: Node, a: Node, b: Node, c: Node, d: Node) -> None:
        builder.add_edge(s, a).add_edge(a, b).add_edge(b, a, condition=lambda text: bool(text))
        builder.add_edge(b, c, condition=lambda text: not text).add_edge(c, d)

    assert find_deliveries(build(edges)) == [Delivery("b", ("a",)), Delivery("d", ("c",))]


def test_a_loop_that_returns_by_two_ways_delivers_nothing() -> None:
    def edges(builder: WorkflowBuilder, s: Node, a: Node, b: Node, c: Node, d: Node) -> None:
        builder.add_edge(s, a).add_fan_out_edges(a, [b, c]).add_edge(b, a).add_edge(c, a)
        builder.add_edge(c, d)

    assert find_deliveries(build(edges)) == []
