"""Describe which agents of a Mixture-of-Agents read which others (``Topology``); pure.

The agents of the first layer read only the question. An agent of a later layer reads agents of the
layer before. The last layer is one agent. In the dense form every agent reads the whole layer
before; in a tree each agent reads, and waits for, a cluster of its own (Faster-MoA §4.1).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

# The agents that one agent reads, by their places in the layer before.
Reads = tuple[int, ...]
Layer = tuple[Reads, ...]
# Identifies a cluster: the layer of its readers, and the agents that they read.
ClusterKey = tuple[int, Reads]


@dataclass(frozen=True, slots=True)
class Topology:
    """A layered graph: for each agent, the agents that it reads, in the order of its slots.

    ``layers[0]`` are the proposers, ``layers[-1]`` is the last aggregator alone, and
    ``layers[i][j]`` are the places in layer ``i - 1`` of the agents that agent ``j`` reads.

    Raises: ValueError if no agent reads an agent, if an agent of a later layer reads no agent, one
        twice, or one that does not exist, or if the last layer is not one agent.
    """

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        _check_layers(self.layers)

    @classmethod
    def dense(cls, *widths: int) -> Self:
        """Return all-to-all layers, the usual Mixture-of-Agents: ``dense(9, 9, 1)``."""
        _check_widths(widths)
        layers: list[Layer] = [((),) * widths[0]]
        layers += [(tuple(range(before)),) * width for before, width in pairwise(widths)]
        return cls(tuple(layers))

    @classmethod
    def tree(cls, *widths: int) -> Self:
        """Return a tree of clusters of neighbours, of sizes that differ by at most one.

        ``tree(9, 3, 1)`` has three clusters of three, and one of the three aggregators.
        """
        _check_widths(widths)
        sizes: list[list[int]] = []
        for before, width in pairwise(widths):
            if width > before:
                raise ValueError(
                    f"a layer of {width} agents follows one of {before}; in a tree each agent "
                    "reads a separate cluster, so a layer cannot be larger than the one before"
                )
            sizes.append([before // width + (n < before % width) for n in range(width)])
        return cls.clusters(*sizes)

    @classmethod
    def clusters(cls, *sizes: Sequence[int]) -> Self:
        """Return a tree from the sizes of its clusters: ``clusters([4, 3, 2], [3])``."""
        if not sizes:
            raise ValueError("there are no cluster sizes; give at least those of the first layer")
        layers: list[Layer] = [((),) * sum(sizes[0])]
        for layer in sizes:
            ends = accumulate(layer, initial=0)
            layers.append(tuple(tuple(range(begin, end)) for begin, end in pairwise(ends)))
        return cls(tuple(layers))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``9-3-1`` as a tree, ``9x9x1`` as all-to-all. Raises: ValueError for other texts."""
        for mark, make in (("-", cls.tree), ("x", cls.dense)):
            if re.fullmatch(rf"\d+({mark}\d+)+", text):
                return make(*map(int, text.split(mark)))
        raise ValueError(
            f"{text!r} is not a topology; write a tree as 9-3-1 and all-to-all as 9x9x1"
        )

    @classmethod
    def of(cls, widths: Sequence[int], given: Topology | str | None) -> Topology:
        """Return the given topology, or by default a tree.

        Raises: ValueError if the given topology has other widths; see also :meth:`parse`.
        """
        topology = cls.parse(given) if isinstance(given, str) else given or cls.tree(*widths)
        if topology.widths != tuple(widths):
            raise ValueError(
                f"there are {tuple(widths)} models for a topology of {topology.widths} agents; "
                "give each layer as many models as the topology has agents in it"
            )
        return topology

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the number of agents of each layer."""
        return tuple(len(layer) for layer in self.layers)


def critical_path(
    reads: Sequence[Sequence[Reads]], last: Callable[[ClusterKey], int]
) -> list[ClusterKey]:
    """Return the clusters that the answer waited for, from the last aggregator's cluster back.

    Args:
        reads: for each agent of each layer, the agents that it reads.
        last: returns the place of the agent that a cluster waited for longest.
    """
    path: list[ClusterKey] = []
    place = 0
    for layer in range(len(reads) - 1, 0, -1):
        path.append((layer, reads[layer][place]))
        place = last(path[-1])
    return path


def _check_widths(widths: Sequence[int]) -> None:
    if len(widths) < 2 or min(widths) < 1:
        raise ValueError(
            f"the layers' widths are {tuple(widths)}; give at least two layers, each of at least "
            "one agent"
        )


def _check_layers(layers: Sequence[Layer]) -> None:
    if len(layers) < 2 or any(layers[0]) or len(layers[-1]) != 1:
        raise ValueError(
            f"the layers have {[*map(len, layers)]} agents; there must be two layers or more, the "
            "first must read no agent, and the last must have one agent"
        )
    for number, (before, layer) in enumerate(pairwise(layers), 1):
        for place, reads in enumerate(layer):
            if not reads or len(set(reads)) < len(reads):
                raise ValueError(
                    f"agent {place} of layer {number} reads {reads}; it must read at least one "
                    "agent, and none twice"
                )
        wrong = {place for reads in layer for place in reads} ^ {*range(len(before))}
        if wrong:
            raise ValueError(
                f"layer {number} must read each of the {len(before)} agents of layer {number - 1}, "
                f"counted from 0, and no others; agents {sorted(wrong)} are not read, or are none"
            )
