"""Read from a team's manager who may speak next, and who will have written by then.

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

from flashmoa.autogen._dry_run import is_stock
from flashmoa.linking.forecasts import Step, Turn

# Stands for the manager's own calls (Selector, MagenticOne); no participant can have this name.
MANAGER = "(manager)"
# Stands for the call of a SocietyOfMindAgent that reads what its inner team has said.
SUMMARY = "(summary)"

# AutoGen's own selector prompt lists the candidates, who change each turn, before the conversation,
# so that the conversation is not found in the cache the next time. The beginning of this prompt
# stays the same from turn to turn.
SELECTOR_PROMPT = """You decide who speaks next in a conversation. Who takes part:
{roles}

The conversation so far:

{history}

Which one of {participants} should speak next? Answer with that name and nothing else."""


def upcoming_turns(manager: BaseGroupChatManager, speaker: str) -> list[Turn]:
    """Return the turns that may follow while ``speaker`` writes, the likeliest first.

    The speaker's own next turn is not among them: its text becomes an assistant message there,
    which cannot be known before the text is complete.
    """
    for kind, rule in _RULES.items():
        if is_stock(manager, kind):
            return rule(manager, speaker)
    return []


def first_turns(manager: BaseGroupChatManager) -> list[Turn]:
    """Return the first turns of a team's next run, once this one has ended.

    There are none if the next task decides who begins. None of them is sure, as that task is not
    known yet.
    """
    for kind, rule in _FIRST_RULES.items():
        if is_stock(manager, kind):
            return [Turn(name, sure=False) for name in rule(manager)]
    return []


def summary_turn(turns: Sequence[Turn], speaker: str) -> Turn:
    """Return the turn of a ``SocietyOfMindAgent`` if its team ends with those who write now.

    Args:
        turns: see :func:`upcoming_turns`.
        speaker: name of an agent that is writing now.
    """
    writing_now = [turn.after[0] for turn in turns if turn.after]
    return Turn(SUMMARY, (frozenset([speaker]).union(*writing_now),), sure=False)


def _round_robin_turns(manager: Any, speaker: str) -> list[Turn]:
    names = list(manager._participant_names)
    position = names.index(speaker)
    order = names[position + 1 :] + names[:position]
    if manager._max_turns is not None:
        # The turn being taken is counted when it ends.
        order = order[: max(0, manager._max_turns - manager._current_turn - 1)]
    steps = [frozenset([name]) for name in [speaker, *order]]
    return [Turn(name, tuple(steps[: place + 1])) for place, name in enumerate(order)]


def _graph_turns(manager: Any, speaker: str) -> list[Turn]:
    """Follow the graph: the next step begins when every agent of this one has finished."""
    run = _GraphRun(manager)
    active = list(manager._active_speakers)
    if speaker not in active:
        active.append(speaker)
    steps_left = None
    if manager._max_turns is not None:
        steps_left = manager._max_turns - manager._current_turn - 1
    turns: list[Turn] = []
    steps: list[Step] = []
    seen = set(active)
    sure = True
    while active and (steps_left is None or len(steps) < steps_left):
        steps.append(frozenset(active))
        sure = run.finish(active) and sure
        active = run.drain()
        turns += [Turn(name, tuple(steps), sure) for name in active if name not in seen]
        if not sure or seen & set(active):
            break
        seen |= set(active)
    return turns


class _GraphRun:
    """Steps through a graph on a copy of a ``GraphFlowManager``'s counters."""

    def __init__(self, manager: Any) -> None:
        self._edges = manager._edges
        self._activation = manager._activation
        self._remaining = copy.deepcopy(manager._remaining)
        self._origin = manager._origin_remaining
        self._enqueued = copy.deepcopy(manager._enqueued_any)
        self._triggered = copy.deepcopy(manager._triggered_activation_groups)
        self._ready: deque[str] = deque(manager._ready)

    def finish(self, names: Sequence[str]) -> bool:
        """Continue as if these agents had spoken and their edges' conditions held.

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
        """Return the names of the agents that speak next, and reset their counters."""
        names = list(dict.fromkeys(self._ready))
        self._ready.clear()
        for name in names:
            for group in self._triggered.pop(name, ()):
                if self._activation[name][group] == "any":
                    self._enqueued[name][group] = False
                else:
                    self._remaining[name][group] = self._origin[name][group]
        return names


def _selector_turns(manager: Any, speaker: str) -> list[Turn]:
    if speaker != MANAGER and _is_last_turn(manager):
        return []
    after = () if speaker == MANAGER else (frozenset([speaker]),)
    previous = manager._previous_speaker
    repeated = manager._allow_repeated_speaker
    names = [
        name
        for name in _sort_by_habit(manager, previous)
        if name != speaker and (repeated or name != previous)
    ]
    candidates = [Turn(name, after, sure=False) for name in names]
    if speaker == MANAGER or not _asks_model(manager) or len(names) < 2:
        return candidates
    return [Turn(MANAGER, after), *candidates]


def _asks_model(manager: Any) -> bool:
    """Return whether a model selects the speaker, and not a function of the user's."""
    return manager._selector_func is None and manager._candidate_func is None


def _is_last_turn(manager: Any) -> bool:
    return manager._max_turns is not None and manager._current_turn + 1 >= manager._max_turns


def _sort_by_habit(manager: Any, speaker: str | None) -> list[str]:
    """Return the participants, those who followed ``speaker`` most often so far first."""
    names = list(manager._participant_names)
    spoke = [m.source for m in manager._message_thread if m.source in names]
    followed = [after for before, after in pairwise(spoke) if before == speaker]
    return sorted(names, key=lambda name: -followed.count(name))


def _swarm_turns(manager: Any, speaker: str) -> list[Turn]:
    """Return the turns of those the speaker may hand off to.

    No writer is named: what comes before the handoff's message (a thought of the speaker's,
    results of its other tools) cannot be known.
    """
    if _is_last_turn(manager):
        return []
    names = [name for name in _sort_by_habit(manager, speaker) if name != speaker]
    return [Turn(name, sure=False) for name in names]


def _magentic_turns(manager: Any, speaker: str) -> list[Turn]:
    """Return the orchestrator's turn after each agent's, and the agents' turns after that.

    The orchestrator cuts its instruction out of JSON, so that its text never arrives as written.
    """
    if speaker == MANAGER:
        return [
            Turn(name, (frozenset([MANAGER]),), sure=False)
            for name in _sort_by_habit(manager, None)
            if manager._message_thread
        ]
    steps = (frozenset([speaker]), frozenset([MANAGER]))
    others = [name for name in manager._participant_names if name != speaker]
    return [Turn(MANAGER, steps[:1]), *(Turn(name, steps, sure=False) for name in others)]


_RULES: dict[type[BaseGroupChatManager], Callable[[Any, str], list[Turn]]] = {
    RoundRobinGroupChatManager: _round_robin_turns,
    GraphFlowManager: _graph_turns,
    SelectorGroupChatManager: _selector_turns,
    SwarmGroupChatManager: _swarm_turns,
    MagenticOneOrchestrator: _magentic_turns,
}


def _first_of_selector(manager: Any) -> list[str]:
    return [MANAGER] if _asks_model(manager) and len(manager._participant_names) > 1 else []


def _first_of_swarm(manager: Any) -> list[str]:
    handoffs = [m for m in manager._message_thread if isinstance(m, HandoffMessage)]
    first = handoffs[-1].target if handoffs else manager._current_speaker
    # The last handoff may be to the user, who then says who goes on.
    return [first] if first in manager._participant_names else []


_FIRST_RULES: dict[type[BaseGroupChatManager], Callable[[Any], list[str]]] = {
    RoundRobinGroupChatManager: lambda m: [m._participant_names[m._next_speaker_index]],
    GraphFlowManager: lambda m: list(m._ready),
    SelectorGroupChatManager: _first_of_selector,
    SwarmGroupChatManager: _first_of_swarm,
}
