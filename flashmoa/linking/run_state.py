"""What a planner knows of its team's current run: who is writing, and who has no link, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from flashmoa.linking.linked_call import LinkedCall
from flashmoa.linking.planned_links import Turn


class Attempt(Enum):
    """How the last attempt to link an agent that has no link ended."""

    # It goes on, or the agent's writers were done before it could end.
    UNFINISHED = auto()
    # Its next prompt could not be told.
    DECLINED = auto()
    # Its engine has no plugin; it is asked again in the team's next run.
    PLAIN_ENGINE = auto()


@dataclass(slots=True)
class RunState:
    """What the planner knows of the team's current run.

    Attributes:
        running: by agent, the calls whose text has not been delivered to the others yet.
        caller: who called last; "" before the first call.
        attempts: by agent, why it has no link; nothing where none was tried, or one was made.
        changes: counts what makes a plan out of date: a call, the end of a run. Every
            plan compares it after each await.
    """

    running: dict[str, LinkedCall] = field(default_factory=dict[str, LinkedCall])
    caller: str = ""
    attempts: dict[str, Attempt] = field(default_factory=dict[str, Attempt])
    changes: int = 0

    def call(self, call: LinkedCall) -> None:
        """Note a call that has begun.

        Calls that were complete before have been delivered, or another agent is waited for.
        """
        self.running = {n: c for n, c in self.running.items() if not c.text.is_complete}
        self.running[call.agent] = call
        self.caller = call.agent

    def end(self) -> None:
        """Note that the run has ended."""
        self.changes += 1
        self.running.clear()
        for agent, attempt in list(self.attempts.items()):
            if attempt is not Attempt.DECLINED:
                del self.attempts[agent]

    def is_now(self, turn: Turn) -> bool:
        """Return whether those who are to be writing before a turn still are.

        Else their messages are on the way, and the call that follows has links planned again.
        """
        now = [self.running.get(name) for name in turn.after[0]] if turn.after else []
        return all(call is None or not call.text.is_complete for call in now)

    def attempt_ended(self, agent: str) -> None:
        """Note that an attempt to link an agent ended, not for haste."""
        if self.attempts.get(agent) is Attempt.UNFINISHED:
            del self.attempts[agent]
