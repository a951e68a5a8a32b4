"""Record which agents of a team are writing, and why an agent has no link (:class:`RunState`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from flashmoa.linking.linked_call import LinkedCall
from flashmoa.linking.planned_links import Turn


class Attempt(Enum):
    """How the last attempt to link an agent that has no link ended."""

    # The attempt has not ended, or was given up because a writer or another call was faster.
    UNFINISHED = auto()
    # The agent's next prompt could not be forecast.
    DECLINED = auto()
    # The engine has no plugin, and links are off there. The next attempt is made in the team's
    # next run.
    PLAIN_ENGINE = auto()


@dataclass(slots=True)
class RunState:
    """What a planner knows about its team's current run.

    Attributes:
        running: by agent, the calls whose text has not been delivered to the other agents yet.
        caller: the agent that called last; empty before the first call.
        attempts: by agent, why it has no link; without agents that have one, or for which none
            was tried.
        changes: number of events that make a plan out of date: calls, and ends of runs. A plan
            compares it after each ``await``.
    """

    running: dict[str, LinkedCall] = field(default_factory=dict[str, LinkedCall])
    caller: str = ""
    attempts: dict[str, Attempt] = field(default_factory=dict[str, Attempt])
    changes: int = 0

    def add_call(self, call: LinkedCall) -> None:
        """Add a call that has begun, and drop those that are complete.

        The text of a complete call has been delivered by now, unless its team waits for another
        agent.
        """
        incomplete = [other for other in self.running.values() if not other.text.is_complete]
        self.running = {other.agent: other for other in [*incomplete, call]}
        self.caller = call.agent

    def end_run(self) -> None:
        """Forget the run, and the attempts that the next run repeats."""
        self.changes += 1
        self.running.clear()
        for agent, attempt in list(self.attempts.items()):
            if attempt is not Attempt.DECLINED:
                del self.attempts[agent]

    def is_current(self, turn: Turn) -> bool:
        """Return whether the agents that write first before a turn are still writing.

        If not, their messages are being delivered, and the next call has the links planned again.
        """
        calls = [self.running.get(name) for name in turn.after[0]] if turn.after else []
        return all(call is None or not call.text.is_complete for call in calls)

    def drop_unfinished_attempt(self, agent: str) -> None:
        """Forget an unfinished attempt to link an agent: it has ended, or the agent has called."""
        if self.attempts.get(agent) is Attempt.UNFINISHED:
            del self.attempts[agent]
