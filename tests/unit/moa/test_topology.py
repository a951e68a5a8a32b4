"""Layers of agents: trees, all-to-all, clusters, and invalid topologies."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa import EngineClient
from flashmoa.moa import MixtureOfAgents, Model
from flashmoa.moa.topology import Topology, critical_path


def test_tree_and_all_to_all_are_as_in_the_paper() -> None:
    tree, dense = Topology.parse("9-3-1"), Topology.parse("9x9x1")
    assert tree.widths == (9, 3, 1) and dense.widths == (9, 9, 1)
    assert tree.layers[1] == ((0, 1, 2), (3, 4, 5), (6, 7, 8)) and tree.layers[2] == ((0, 1, 2),)
    assert set(dense.layers[1]) == {tuple(range(9))}


def test_clusters_may_differ_in_size() -> None:
    mixed = Topology.clusters([4, 3, 2], [3])
    assert mixed.layers[1] == ((0, 1, 2, 3), (4, 5, 6), (7, 8)) and mixed.widths == (9, 3, 1)
    assert Topology.tree(5, 2, 1).layers[1] == ((0, 1, 2), (3, 4))


def test_critical_path_follows_each_last_answer() -> None:
    tree = Topology.parse("9-3-1")
    last = {(2, (0, 1, 2)): 1, (1, (3, 4, 5)): 5}
    assert critical_path(tree.layers, last.__getitem__) == [(2, (0, 1, 2)), (1, (3, 4, 5))]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_every_agent_of_a_tree_has_one_reader(widths: list[int]) -> None:
    tree = Topology.tree(*sorted(widths, reverse=True), 1)
    for width, layer in zip(tree.widths, tree.layers[1:], strict=False):
        # Neighbours are read together.
        assert [place for reads in layer for place in reads] == list(range(width))


def test_invalid_topologies_are_refused() -> None:
    layers: Any = [((0, 1), (0, 1)), ((0,),), ((0, 0),), ((0, 2),), ((),)]
    for invalid in ((((), ()),), (((), (0,)), ((0, 1),)), *((((), ()), last) for last in layers)):
        with pytest.raises(ValueError, match=r"layer|read"):
            Topology(invalid)
    for text in ("", "9", "9-3-", "9-3x1", "3-9-1", "9-3-2", "0-1", "a-b"):
        with pytest.raises(ValueError):
            Topology.parse(text)


def test_layers_must_match_the_topology() -> None:
    model = Model(EngineClient("http://127.0.0.1:9"))
    with pytest.raises(ValueError, match=r"\(2, 1\) models for a topology of \(3, 1\)"):
        MixtureOfAgents([[model, model], [model]], "3-1")
