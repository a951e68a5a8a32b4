"""Who may speak next, read from managers without a runtime."""

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest
from autogen_agentchat.messages import HandoffMessage
from autogen_agentchat.teams._group_chat._graph._digraph_group_chat import (
    DiGraph,
    DiGraphEdge,
    DiGraphNode,
    GraphFlowManager,
)
from autogen_agentchat.teams._group_chat._round_robin_group_chat import RoundRobinGroupChatManager
from autogen_agentchat.teams._group_chat._selector_group_chat import SelectorGroupChatManager
from autogen_agentchat.teams._group_chat._swarm_group_chat import SwarmGroupChatManager
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.frameworks.autogen.team_members import MANAGER, first_turns, upcoming_turns
from flashmoa.link.expected import Turn, Writers

Edges = set[tuple[int, int]]


def graph_manager(edges: Edges, size: int, conditions: Edges = frozenset()) -> Any:  # type: ignore[assignment]
    """Make a ``GraphFlowManager`` as it is before its first step, without a runtime."""
    nodes = {f"a{n}": DiGraphNode(name=f"a{n}", edges=[]) for n in range(size)}
    for start, end in sorted(edges):
        word = "yes" if (start, end) in conditions else None
        nodes[f"a{start}"].edges.append(DiGraphEdge(target=f"a{end}", condition=word))
    graph = DiGraph(nodes=nodes)
    manager: Any = GraphFlowManager.__new__(GraphFlowManager)
    manager._edges = {name: node.edges for name, node in nodes.items()}
    manager._build_lookup_tables(graph)
    counts = graph.get_remaining_map().items()
    vars(manager).update(
        _remaining={name: Counter(groups) for name, groups in counts},
        _origin_remaining={name: Counter(groups) for name, groups in counts},
        _triggered_activation_groups={},
        _graph=graph,
        _ready=deque(),
        _active_speakers=["a0"],
        _max_turns=None,
        _current_turn=0,
    )
    return manager


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Edges, int]:
    """Draw the edges of a connected graph without cycles that begins with agent 0, and its size."""
    size = draw(st.integers(2, 7))
    edges = {(draw(st.integers(0, end - 1)), end) for end in range(1, size)}
    pairs = [(start, end) for end in range(size) for start in range(end)]
    return edges | set(draw(st.lists(st.sampled_from(pairs), max_size=6))), size


def oracle(edges: Edges, size: int) -> list[Writers]:
    """Compute the steps of a graph without conditions: agents run once all parents have spoken."""
    spoken: set[int] = set()
    steps: list[Writers] = []
    while len(spoken) < size:
        step = {
            n
            for n in range(size)
            if n not in spoken and {start for start, end in edges if end == n} <= spoken
        }
        steps.append(frozenset(f"a{n}" for n in step))
        spoken |= step
    return steps


@given(graph=graphs())
def test_turns_of_a_graph_are_forecast_to_its_end(graph: tuple[Edges, int]) -> None:
    edges, size = graph
    manager = graph_manager(edges, size)
    steps = oracle(edges, size)
    manager._active_speakers = sorted(steps[0])
    expected = {
        Turn(name, tuple(steps[:place])) for place in range(1, len(steps)) for name in steps[place]
    }
    before = repr(vars(manager))
    assert set(upcoming_turns(manager, "a0")) == expected
    assert repr(vars(manager)) == before


def test_turns_after_a_condition_are_unsure() -> None:
    edges: Edges = {(0, 1), (0, 2), (1, 3), (2, 3)}
    manager = graph_manager(edges, 4, conditions={(0, 1), (0, 2)})
    step = frozenset(["a0"])
    assert upcoming_turns(manager, "a0") == [Turn("a1", (step,), False), Turn("a2", (step,), False)]


def test_no_turns_are_forecast_beyond_max_turns() -> None:
    manager = graph_manager({(0, 1), (1, 2)}, 3)
    manager._max_turns = 2
    assert [turn.agent for turn in upcoming_turns(manager, "a0")] == ["a1"]


def test_an_unknown_manager_has_no_turns() -> None:
    assert upcoming_turns(SimpleNamespace(), "one") == []  # type: ignore[arg-type]
    assert first_turns(SimpleNamespace()) == []  # type: ignore[arg-type]


HANDOFF = HandoffMessage(content="Go.", source="one", target="three")
TO_USER = HandoffMessage(content="Your turn.", source="three", target="user")


@pytest.mark.parametrize(
    ("kind", "state", "agents"),
    [
        (SwarmGroupChatManager, {"_current_speaker": "one"}, ["one"]),
        (SwarmGroupChatManager, {"_message_thread": [HANDOFF]}, ["three"]),
        (SwarmGroupChatManager, {"_message_thread": [HANDOFF, TO_USER]}, []),
        (RoundRobinGroupChatManager, {"_next_speaker_index": 1}, ["two"]),
        (GraphFlowManager, {"_ready": ["one", "two"]}, ["one", "two"]),
        (SelectorGroupChatManager, {"_selector_func": None, "_candidate_func": None}, [MANAGER]),
        (SelectorGroupChatManager, {"_selector_func": lambda _: "one"}, []),
    ],
)
def test_every_manager_forecasts_first_turns(kind: Any, state: Any, agents: list[str]) -> None:
    """The runs of the managers' teams have ended; there is no runtime."""
    manager: Any = kind.__new__(kind)
    names = ["one", "two", "three"]
    vars(manager).update({"_participant_names": names, "_message_thread": [], **state})
    assert first_turns(manager) == [Turn(agent, sure=False) for agent in agents]
