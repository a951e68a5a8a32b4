"""Who reads whom in a Mixture-of-Agents; pure.

Layers of agents: the first one's read the question only, each later one's read some of the layer
before, and the last layer is one agent. In the dense form everybody reads everybody; in a tree
each agent reads a cluster of its own, and need not wait for other clusters (Faster-MoA §4.1).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

# Of an agent: the places, in the layer before, of those it reads.
Reads = tuple[int, ...]
Layer = tuple[Reads, ...]
# A layer, and whom some of its agents read.
ClusterKey = tuple[int, Reads]


@dataclass(frozen=True, slots=True)
class Topology:
    """Which agents of the layer before each agent reads, in the order of its answer slots.

    ``layers[0]`` are the proposers, ``layers[-1]`` is the last aggregator alone, and
    ``layers[i][j]`` are the places in layer ``i - 1`` of those that agent ``j`` reads.

    Raises: ValueError where that is no layered graph with one agent at its end.
    """

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        _check(self.layers)

    @classmethod
    def dense(cls, *widths: int) -> Self:
        """All-to-all, the usual Mixture-of-Agents: ``dense(9, 9, 1)``."""
        _check_widths(widths)
        layers: list[Layer] = [((),) * widths[0]]
        layers += [(tuple(range(before)),) * width for before, width in pairwise(widths)]
        return cls(tuple(layers))

    @classmethod
    def tree(cls, *widths: int) -> Self:
        """Clusters of neighbours, as equal as can be: ``tree(9, 3, 1)`` has three of three."""
        _check_widths(widths)
        layers: list[Layer] = [((),) * widths[0]]
        for before, width in pairwise(widths):
            if width > before:
                raise ValueError(f"{width} agents cannot have a cluster each of {before} agents")
            layers.append(_clusters([before // width + (n < before % width) for n in range(width)]))
        return cls(tuple(layers))

    @classmethod
    def clusters(cls, *sizes: Sequence[int]) -> Self:
        """A tree by the sizes of its clusters: ``clusters([4, 3, 2], [3])``."""
        if not sizes:
            raise ValueError("say the sizes of the first layer's clusters at least")
        layers: list[Layer] = [((),) * sum(sizes[0])]
        layers += [_clusters(layer) for layer in sizes]
        return cls(tuple(layers))

    @classmethod
    def parse(cls, text: str) -> Self:
        """``9-3-1`` is a tree, ``9x9x1`` is all-to-all. Raises: ValueError."""
        for mark, make in (("-", cls.tree), ("x", cls.dense)):
            if re.fullmatch(rf"\d+({mark}\d+)+", text):
                return make(*map(int, text.split(mark)))
        raise ValueError(f"{text!r} is no topology; write a tree as 9-3-1 and all-to-all as 9x9x1")

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(len(layer) for layer in self.layers)

    def readers(self, layer: int, place: int) -> tuple[int, ...]:
        """Places in the next layer of those that read an agent."""
        if layer + 1 == len(self.layers):
            return ()
        after = self.layers[layer + 1]
        return tuple(reader for reader, reads in enumerate(after) if place in reads)

    def critical_path(self, last: Callable[[ClusterKey], int]) -> list[ClusterKey]:
        """The clusters that the answer waited for, the last aggregator's first.

        Args:
            last: the place of the agent that was waited for longest in a cluster.
        """
        path: list[ClusterKey] = []
        place = 0
        for layer in range(len(self.layers) - 1, 0, -1):
            path.append((layer, self.layers[layer][place]))
            place = last(path[-1])
        return path


def _clusters(sizes: Sequence[int]) -> Layer:
    ends = list(accumulate(sizes, initial=0))
    return tuple(tuple(range(begin, end)) for begin, end in pairwise(ends))


def _check_widths(widths: Sequence[int]) -> None:
    if len(widths) < 2 or min(widths) < 1:
        raise ValueError(f"{widths} are no widths: at least two layers of at least one agent")


def _check(layers: Sequence[Layer]) -> None:
    if len(layers) < 2 or any(layers[0]):
        raise ValueError("a topology has proposers, who read nobody, and at least one layer more")
    if len(layers[-1]) != 1:
        raise ValueError(f"the last layer is one agent, not {len(layers[-1])}")
    for number, (before, layer) in enumerate(pairwise(layers), 1):
        for reads in layer:
            if not reads or len(set(reads)) < len(reads):
                raise ValueError(f"an agent of layer {number} reads nobody, or somebody twice")
        read = {place for reads in layer for place in reads}
        if not read <= set(range(len(before))):
            raise ValueError(f"layer {number} reads agents that layer {number - 1} does not have")
        if unread := set(range(len(before))) - read:
            raise ValueError(f"nobody reads agents {sorted(unread)} of layer {number - 1}")
