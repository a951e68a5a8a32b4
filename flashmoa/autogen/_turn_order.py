"""Who may speak next, and who will have written by then, read from the team's own manager.

Nothing is called that could have effects: no selector function, no termination condition.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from autogen_agentchat.messages import HandoffMessage
from autogen_agentchat.teams._group_chat._base_group_chat_manager import BaseGroupChatManager
from autogen_agentchat.teams._group_chat._graph._digraph_group_chat import GraphFlowManager
from autogen_agentchat.teams._group_chat._magentic_one._magentic_one_orchestrator import (
    MagenticOneOrchestrator,
)
from autogen_agentchat.teams._group_chat._round_robin_group_chat import RoundRobinGroupChatManager
from autogen_agentchat.teams._group_chat._selector_group_chat import SelectorGroupChatManager
from autogen_agentchat.teams._group_chat._swarm_group_chat import SwarmGroupChatManager

from flashmoa.autogen._stock import own_code
from flashmoa.linking.planned_links import Step, Turn

# The manager's own calls (Selector, MagenticOne); no participant can be called so.
MANAGER = "(manager)"
# The call of a SocietyOfMindAgent that reads what its team has said.
SUMMARY = "(summary)"

# AutoGen's own selector prompt names the participants, who change each turn, before the
# conversation, so that nothing of the conversation is found in the cache the next time. The
# beginning of this one stays the same from turn to turn.
SELECTOR_PROMPT = """You decide who speaks next in a conversation. Who takes part:
{roles}

The conversation so far:

{history}

Which one of {participants} should speak next? Answer with that name and nothing else."""


def upcoming(manager: BaseGroupChatManager, speaker: str) -> list[Turn]:
    """Return the turns that may follow, the likeliest first, while ``speaker`` writes.

    An agent's own next turn is not among them: its text becomes an assistant message there,
    which cannot be known before it is complete.
    """
    for kind, rule in _RULES.items():
        if own_code(manager, kind) is None:
            return rule(manager, speaker)
    return []


def starting(manager: BaseGroupChatManager) -> list[Turn]:
    """Return the first turns of a team's next run, once this one has ended.

    There are none where the task decides; none of them is sure, as the task is not known yet.
    """
    for kind, rule in _FIRST.items():
        if own_code(manager, kind) is None:
            return [Turn(name, sure=False) for name in rule(manager)]
    return []


def summary(turns: Sequence[Turn], speaker: str) -> Turn:
    """Return the reader's turn, if the team ends with those who are writing now.

    Args:
        turns: :func:`upcoming`.
    """
    now = [turn.after[0] for turn in turns if turn.after]
    return Turn(SUMMARY, (frozenset([speaker]).union(*now),), sure=False)


def _round_robin(manager: Any, speaker: str) -> list[Turn]:
    names = list(manager._participant_names)
    position = names.index(speaker)
    order = names[position + 1 :] + names[:position]
    if manager._max_turns is not None:
        # The turn being taken is counted when it ends.
        order = order[: max(0, manager._max_turns - manager._current_turn - 1)]
    steps = [frozenset([name]) for name in [speaker, *order]]
    return [Turn(name, tuple(steps[: place + 1])) for place, name in enumerate(order)]


def _graph(manager: Any, speaker: str) -> list[Turn]:
    """Follow the graph: the next step begins when every agent of this one has finished."""
    run = _GraphRun(manager)
    active = list(manager._active_speakers)
    if speaker not in active:
        active.append(speaker)
    left = None
    if manager._max_turns is not None:
        left = manager._max_turns - manager._current_turn - 1
    turns: list[Turn] = []
    steps: list[Step] = []
    seen = set(active)
    sure = True
    while active and (left is None or len(steps) < left):
        steps.append(frozenset(active))
        sure = run.finish(active) and sure
        active = run.drain()
        turns += [Turn(name, tuple(steps), sure) for name in active if name not in seen]
        if not sure or seen & set(active):
            break
        seen |= set(active)
    return turns


class _GraphRun:
    """The counters of a ``GraphFlowManager``, to be run ahead on a copy."""

    def __init__(self, manager: Any) -> None:
        self._edges = manager._edges
        self._activation = manager._activation
        self._remaining = copy.deepcopy(manager._remaining)
        self._origin = manager._origin_remaining
        self._enqueued = copy.deepcopy(manager._enqueued_any)
        self._triggered = copy.deepcopy(manager._triggered_activation_groups)
        self._ready: deque[str] = deque(manager._ready)

    def finish(self, names: Sequence[str]) -> bool:
        """Go on as if these had spoken and every condition on what they said held.

        Returns: whether there was no condition.
        """
        edges = [edge for name in names for edge in self._edges.get(name, ())]
        for edge in edges:
            self._follow(edge.target, edge.activation_group)
        return all(edge.condition is None and edge.condition_function is None for edge in edges)

    def _follow(self, target: str, group: str) -> None:
        if self._activation[target][group] == "all":
            self._remaining[target][group] -= 1
            if self._remaining[target][group] != 0:
                return
        elif self._enqueued[target][group]:
            return
        else:
            self._enqueued[target][group] = True
        self._ready.append(target)
        self._triggered.setdefault(target, set()).add(group)

    def drain(self) -> list[str]:
        """Return who speaks next, and reset the counters of those agents."""
        names = list(dict.fromkeys(self._ready))
        self._ready.clear()
        for name in names:
            for group in self._triggered.pop(name, ()):
                if self._activation[name][group] == "any":
                    self._enqueued[name][group] = False
                else:
                    self._remaining[name][group] = self._origin[name][group]
        return names


def _selector(manager: Any, speaker: str) -> list[Turn]:
    if speaker != MANAGER and _is_last_turn(manager):
        return []
    after = () if speaker == MANAGER else (frozenset([speaker]),)
    previous = manager._previous_speaker
    repeated = manager._allow_repeated_speaker
    names = [
        name
        for name in _by_habit(manager, previous)
        if name != speaker and (repeated or name != previous)
    ]
    candidates = [Turn(name, after, sure=False) for name in names]
    if speaker == MANAGER or not _asks_model(manager) or len(names) < 2:
        return candidates
    return [Turn(MANAGER, after), *candidates]


def _asks_model(manager: Any) -> bool:
    """Return whether the model selects: calling a function that selects could have effects."""
    return manager._selector_func is None and manager._candidate_func is None


def _is_last_turn(manager: Any) -> bool:
    return manager._max_turns is not None and manager._current_turn + 1 >= manager._max_turns


def _by_habit(manager: Any, speaker: str | None) -> list[str]:
    """Return the participants, first those who followed ``speaker`` most often so far."""
    names = list(manager._participant_names)
    spoke = [m.source for m in manager._message_thread if m.source in names]
    followed = [after for before, after in pairwise(spoke) if before == speaker]
    return sorted(names, key=lambda name: -followed.count(name))


def _swarm(manager: Any, speaker: str) -> list[Turn]:
    """Return those it may hand off to. What comes before the handoff's message, a thought of the
    speaker's or results of its other tools, cannot be known."""
    if _is_last_turn(manager):
        return []
    names = [name for name in _by_habit(manager, speaker) if name != speaker]
    return [Turn(name, sure=False) for name in names]


def _magentic(manager: Any, speaker: str) -> list[Turn]:
    """Return the orchestrator's turn after each agent; its instruction is cut out of JSON, so it
    is a writer whose text is never seen."""
    if speaker == MANAGER:
        return [
            Turn(name, (frozenset([MANAGER]),), sure=False)
            for name in _by_habit(manager, None)
            if manager._message_thread
        ]
    steps = (frozenset([speaker]), frozenset([MANAGER]))
    others = [name for name in manager._participant_names if name != speaker]
    return [Turn(MANAGER, steps[:1]), *(Turn(name, steps, sure=False) for name in others)]


_RULES: dict[type[BaseGroupChatManager], Callable[[Any, str], list[Turn]]] = {
    RoundRobinGroupChatManager: _round_robin,
    GraphFlowManager: _graph,
    SelectorGroupChatManager: _selector,
    SwarmGroupChatManager: _swarm,
    MagenticOneOrchestrator: _magentic,
}


def _first_selected(manager: Any) -> list[str]:
    return [MANAGER] if _asks_model(manager) and len(manager._participant_names) > 1 else []


def _first_of_swarm(manager: Any) -> list[str]:
    handoffs = [m for m in manager._message_thread if isinstance(m, HandoffMessage)]
    return [handoffs[-1].target if handoffs else manager._current_speaker]


_FIRST: dict[type[BaseGroupChatManager], Callable[[Any], list[str]]] = {
    RoundRobinGroupChatManager: lambda m: [m._participant_names[m._next_speaker_index]],
    GraphFlowManager: lambda m: list(m._ready),
    SelectorGroupChatManager: _first_selected,
    SwarmGroupChatManager: _first_of_swarm,
}
