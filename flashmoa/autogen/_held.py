"""The links of one team, each with what it was made from: whether it still is the right one."""

from __future__ import annotations

from collections.abc import Iterable

from flashmoa.autogen._forecast import UNCERTAIN
from flashmoa.autogen._roster import Basis, Roster
from flashmoa.autogen._speakers import SUMMARY, Turn
from flashmoa.linking.link import Link
from flashmoa.linking.prompt import Prompt


class HeldLinks:
    """By the names of the agents linked to.

    Args:
        streams: whether text is streamed into them.
    """

    def __init__(self, roster: Roster, *, streams: bool) -> None:
        self._roster = roster
        self._streams = streams
        self._links: dict[str, Link] = {}
        self._bases: dict[str, Basis] = {}
        # Those found to be for turns that cannot come, when that was last looked at.
        self._idle: set[str] = set()

    def all(self) -> Iterable[tuple[str, Link]]:
        return list(self._links.items())

    def unsure(self) -> list[Link]:
        """Those to agents that may but need not be next."""
        return [link for name, link in self._links.items() if not self._bases[name].turn.sure]

    def add(self, link: Link, basis: Basis) -> None:
        name = basis.turn.agent
        self._links[name], self._bases[name] = link, basis

    def take(self, agent: str) -> Link | None:
        """The link to the prompt of a call that is here; not one that was made for another."""
        link = self._links.pop(agent, None)
        if link is None or self._came_true(link, self._bases[agent]):
            return link
        link.end("mispredicted")
        return None

    def _came_true(self, link: Link, basis: Basis) -> bool:
        """Whether an agent that calls its model has received what its link was made for. It has
        not where the team was stopped before, and was run again or reset."""
        came = self._roster.since(basis)
        if came is None or not self._streams:
            return came is not None
        if link.prompt.is_complete:
            return came == basis.coming
        return came >= sum(not slot.is_open for slot in link.prompt.slots)

    def fits(self, turn: Turn) -> bool:
        """Whether there is a link for a turn that needs nothing new."""
        link = self._links.get(turn.agent)
        if link is None or (link.is_over and self._streams):
            return False
        basis = self._bases[turn.agent]
        came = self._roster.since(basis)
        if came is None or not self._streams:
            return came is not None
        if came == 0 and basis.turn == turn:
            return True
        waits = {slot.name for slot in link.prompt.slots if slot.is_open}
        if UNCERTAIN in waits:
            return False
        return waits == set(turn.writers) and came <= basis.coming - len(waits)

    def go_on(self, prompt: Prompt, basis: Basis) -> Link | None:
        """The link to an agent, going on with what is certain now; ended where that cannot be."""
        link = self._links.get(basis.turn.agent)
        if link is None or link.is_over:
            return None
        if not _is_same(link.prompt, prompt) and not link.become(prompt):
            self.end(basis.turn.agent, "mispredicted")
            return None
        self._bases[basis.turn.agent] = basis
        return link

    def are_of_this_run(self) -> bool:
        """Whether there are any, and the team was not reset since they were made."""
        bases = [self._bases[name] for name in self._links]
        return bool(bases) and all(self._roster.since(basis) is not None for basis in bases)

    def end(self, agent: str, reason: str) -> None:
        link = self._links.pop(agent, None)
        if link is not None:
            link.end(reason)

    def end_idle(self, possible: set[str]) -> None:
        """End links to all but these, at the second look: a manager that is just asking several
        to speak has not asked all of them yet."""
        idle = self._links.keys() - possible - {SUMMARY}
        for name in idle & self._idle:
            self.end(name, "unused")
        self._idle = idle


def _is_same(prompt: Prompt, other: Prompt) -> bool:
    return prompt.is_complete and other.is_complete and prompt.stable() == other.stable()
