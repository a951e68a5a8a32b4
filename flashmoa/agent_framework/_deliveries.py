"""Who is given what others write, told by a workflow's edges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent_framework import FanInEdgeGroup, FanOutEdgeGroup, SingleEdgeGroup, Workflow
from agent_framework._workflows._edge import InternalEdgeGroup


@dataclass(frozen=True, slots=True)
class Delivery:
    """What ``sources`` have sent reaches ``target``.

    ``fan_in``: as one list in this order, whoever was first; else there is one source.
    """

    target: str
    sources: tuple[str, ...]
    fan_in: bool = False

    def message(self, sent: Sequence[Any]) -> Any:
        """What the target gets of what each source has sent."""
        return list(sent) if self.fan_in else sent[0]


def deliveries(workflow: Workflow) -> list[Delivery]:
    """Those that happen for certain and to whom nobody else sends."""
    groups = [group for group in workflow.edge_groups if not isinstance(group, InternalEdgeGroup)]
    received = Counter(target for group in groups for target in set(group.target_executor_ids))
    found: list[Delivery] = []
    for group in groups:
        if isinstance(group, FanInEdgeGroup):
            sources = tuple(edge.source_id for edge in group.edges)
            found.append(Delivery(group.edges[0].target_id, sources, fan_in=True))
        elif isinstance(group, SingleEdgeGroup) or (
            isinstance(group, FanOutEdgeGroup) and group.selection_func is None
        ):
            edges = [edge for edge in group.edges if not edge.has_condition]
            found += [Delivery(edge.target_id, (edge.source_id,)) for edge in edges]
    return [one for one in found if received[one.target] == 1]
