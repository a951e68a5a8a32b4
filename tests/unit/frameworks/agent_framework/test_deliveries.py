"""Which executor receives whose messages; no engine."""

import pytest
from agent_framework import (
    Executor,
    Workflow,
    WorkflowBuilder,
    WorkflowContext,
    handler,
)

from flashmoa.frameworks.agent_framework.workflow_link import Delivery, find_deliveries


class Node(Executor):
    @handler
    async def one(self, text: str, ctx: WorkflowContext[str, str]) -> None:
        await ctx.send_message(text)
        await ctx.yield_output(text)

    @handler
    async def several(self, texts: list[str], ctx: WorkflowContext[str, str]) -> None:
        await ctx.send_message("".join(texts))
        await ctx.yield_output("".join(texts))


def build(edges: str) -> Workflow:
    """Build a workflow of edges: ``ab``, ``ab?`` with a condition, fans ``a>bc`` and ``ab>c``."""
    nodes = {name: Node(id=name) for name in "sabcd"}
    builder = WorkflowBuilder(start_executor=nodes["s"], output_from=[nodes["d"]])
    for edge in edges.split():
        sources, _, targets = edge.partition(">")
        if not targets:
            condition = bool if edge.endswith("?") else None
            builder.add_edge(nodes[edge[0]], nodes[edge[1]], condition=condition)
        elif len(sources) == 1:
            builder.add_fan_out_edges(nodes[sources], [nodes[name] for name in targets])
        else:
            builder.add_fan_in_edges([nodes[name] for name in sources], nodes[targets])
    return builder.build()


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        # A fan-in delivers messages in the order of its edges.
        ("s>abc cab>d", "sa sb sc cab>d"),
        # Conditional and double deliveries are left out.
        ("sa? sb bc ad cd", "sb bc"),
        # What an executor sends that is reached by two ways may reach others twice at once, so that
        # its receivers get two messages one after the other.
        ("s>ab ac bc cd", "sa sb"),
        # Deliveries after such a receiver are left out, too.
        ("sa sb ab bc cd", "sa"),
        # In a loop, a round's message has gone around before the next one is sent.
        ("sa ab ba? bc? cd", "ab cd"),
        # A loop that returns by two ways delivers nothing.
        ("sa a>bc ba ca cd", ""),
    ],
)
def test_only_deliveries_that_are_certain_are_found(edges: str, expected: str) -> None:
    found = [
        f"{''.join(each.sources)}{'>' * each.fan_in}{each.target}"
        for each in find_deliveries(build(edges))
    ]
    assert found == expected.split()


def test_a_fan_in_delivers_a_list() -> None:
    assert Delivery("d", ("a", "b"), fan_in=True).make_message(["x", "y"]) == ["x", "y"]
    assert Delivery("d", ("a",)).make_message(["x"]) == "x"
