"""Tell from a workflow's edges who receives whose messages (``find_deliveries``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent_framework import FanInEdgeGroup, FanOutEdgeGroup, SingleEdgeGroup, Workflow
from agent_framework._workflows._edge import EdgeGroup, InternalEdgeGroup


@dataclass(frozen=True, slots=True)
class Delivery:
    """Says that what the executors ``sources`` send reaches the executor ``target``.

    ``fan_in``: as one list in this order, no matter who finishes first; else there is one source.
    """

    target: str
    sources: tuple[str, ...]
    fan_in: bool = False

    def make_message(self, sent: Sequence[Any]) -> Any:
        """Return the message that the target receives, given the message of each source."""
        return list(sent) if self.fan_in else sent[0]


def find_deliveries(workflow: Workflow) -> list[Delivery]:
    """Return the deliveries that are certain, to targets that receive no other messages.

    Not certain is what an executor sends that may be reached again before its receivers have begun.
    """
    groups = [group for group in workflow.edge_groups if not isinstance(group, InternalEdgeGroup)]
    arrivals = _find_arrivals(groups)
    serial = _find_serial(workflow.start_executor_id, arrivals)
    deliveries: list[Delivery] = []
    for group in groups:
        if isinstance(group, FanInEdgeGroup):
            sources = tuple(edge.source_id for edge in group.edges)
            deliveries.append(Delivery(group.edges[0].target_id, sources, fan_in=True))
        elif isinstance(group, SingleEdgeGroup) or (
            isinstance(group, FanOutEdgeGroup) and group.selection_func is None
        ):
            edges = [edge for edge in group.edges if not edge.has_condition]
            deliveries += [Delivery(edge.target_id, (edge.source_id,)) for edge in edges]
    return [
        delivery
        for delivery in deliveries
        if len(arrivals[delivery.target]) == 1 and serial.issuperset(delivery.sources)
    ]


def _find_arrivals(groups: Sequence[EdgeGroup]) -> dict[str, list[set[str]]]:
    """Return for each executor the sources of the edge groups that may bring it a message."""
    arrivals: dict[str, list[set[str]]] = defaultdict(list)
    for group in groups:
        for target in set(group.target_executor_ids):
            arrivals[target].append(set(group.source_executor_ids))
    return arrivals


def _find_serial(start: str, arrivals: dict[str, list[set[str]]]) -> set[str]:
    """Return the executors whose receivers begin before the executors are reached again.

    An executor may be reached by one way from the start and by one that returns from it: then its
    message has gone around before it is reached again. By two ways of a kind, it may be reached
    twice at the same time, and so may its receivers.
    """

    def is_reached_one_by_one(name: str) -> bool:
        ways, downstream = arrivals.get(name, []), _find_downstream(name, arrivals)
        returning = sum(1 for way in ways if way & downstream)
        entering = len(ways) - returning + (name == start)
        return returning <= 1 and entering <= 1 and not any(name in way for way in ways)

    serial = {name for name in {start, *arrivals} if is_reached_one_by_one(name)}
    while after := {
        name for name in serial if any(not way <= serial for way in arrivals.get(name, []))
    }:
        serial -= after
    return serial


def _find_downstream(name: str, arrivals: dict[str, list[set[str]]]) -> set[str]:
    """Return the executors that a message of an executor may reach, by any number of steps."""
    found: set[str] = set()
    while more := {
        target
        for target, ways in arrivals.items()
        if target not in found and any(way & {name, *found} for way in ways)
    }:
        found |= more
    return found
