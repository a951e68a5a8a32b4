"""The links that a planner holds, each with the forecast it was made from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from flashmoa.engine import EngineClient
from flashmoa.linking.failure_policy import OnFailure
from flashmoa.linking.link import Link
from flashmoa.linking.placeholders import UNCERTAIN, Placeholders
from flashmoa.linking.prompt import Prompt

_CHARACTERS_PER_TOKEN = 3

# Agents that write at the same time, and so finish in any order.
Step = frozenset[str]


@dataclass(frozen=True, slots=True)
class Turn:
    """A call that may come.

    Attributes:
        agent: who makes it.
        after: who writes before it, in order, beginning with those who are writing now.
        sure: whether it comes for certain, unless the team ends before.
    """

    agent: str
    after: tuple[Step, ...] = ()
    sure: bool = True

    @property
    def writers(self) -> tuple[str, ...]:
        return tuple(name for step in self.after for name in sorted(step))


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the agent of a turn will ask its model.

    Attributes:
        engine: where its request will go.
        placeholders: for the texts in it that are still being written.
        renders: each renders one of the prompts that it may have; one where that is certain.
            Each raises EngineError.
        on_failure: what becomes of a link to it when a text in its prompt fails.
        namespace: of the request's KV; by default the engine client's.
        coming: how many messages the agent was to receive until its turn, as far as was known.
        received_since: returns how many it has received since the forecast, or ``None`` where its
            team was reset or it has had a turn. Without one, a forecast stays right.
    """

    turn: Turn
    engine: EngineClient
    placeholders: Placeholders
    renders: Sequence[Callable[[], Awaitable[str]]]
    on_failure: OnFailure = "abort"
    namespace: Mapping[str, str] | None = None
    coming: int = 0
    received_since: Callable[[], int | None] | None = None

    @property
    def is_of_this_run(self) -> bool:
        """Whether its team was not reset, and its agent has had no turn, since it was made."""
        return self.received_since is None or self.received_since() is not None

    async def prompt(self) -> Prompt:
        """Build the prompt. Raises: EngineError; NotForecastable."""
        return self.placeholders.build_prompt(*[await render() for render in self.renders])


class PlannedLinks:
    """Links by the names of the agents linked to.

    Args:
        streams: whether text is streamed into them.
    """

    def __init__(self, *, streams: bool) -> None:
        self._streams = streams
        self._links: dict[str, tuple[Link, Forecast]] = {}
        # Agents that could not be next when that was last looked at.
        self._idle: set[str] = set()

    def all(self) -> list[Link]:
        """Return every link that is held."""
        return [link for link, _ in self._links.values()]

    def waiting_for(self, agent: str) -> list[Link]:
        """Return the links whose prompts have an open slot for this agent's text."""
        return [link for link in self.all() if link.waits_for(agent)]

    def add(self, link: Link, forecast: Forecast) -> None:
        """Hold a link that was made from a forecast."""
        self._links[forecast.turn.agent] = link, forecast

    def take(self, agent: str) -> Link | None:
        """Give up the link to an agent's call that is here; end one made for another call."""
        link, forecast = self._links.pop(agent, (None, None))
        if link is None or forecast is None or self._came_true(link, forecast):
            return link
        link.end("mispredicted")
        return None

    def _came_true(self, link: Link, forecast: Forecast) -> bool:
        """Return whether an agent that calls its model has received what its link was made for.

        It has not where the team was stopped before, and was run again or reset.
        """
        if forecast.received_since is None:
            return True
        received = forecast.received_since()
        if received is None or not self._streams:
            return received is not None
        if link.prompt.is_complete:
            return received == forecast.coming
        return received >= sum(not slot.is_open for slot in link.prompt.slots)

    def fits(self, turn: Turn) -> bool:
        """Return whether there is a link for a turn that needs no new forecast."""
        link, forecast = self._links.get(turn.agent, (None, None))
        if link is None or forecast is None or (link.is_over and self._streams):
            return False
        if forecast.received_since is None:
            return True
        received = forecast.received_since()
        if received is None or not self._streams:
            return received is not None
        if received == 0 and forecast.turn == turn:
            return True
        waits = {slot.name for slot in link.prompt.slots if slot.is_open}
        if UNCERTAIN in waits:
            return False
        return waits == set(turn.writers) and received <= forecast.coming - len(waits)

    def extend(self, prompt: Prompt, forecast: Forecast) -> Link | None:
        """Have the link to an agent go on with a newer forecast, in which more is certain.

        Returns: the link; ``None`` where there is none, or it had to be ended because something
            else was sent already.
        """
        agent = forecast.turn.agent
        link, _ = self._links.get(agent, (None, None))
        if link is None or link.is_over:
            return None
        if not _is_same(link.prompt, prompt) and not link.become(prompt):
            self.end(agent, "mispredicted")
            return None
        self._links[agent] = link, forecast
        return link

    def are_of_this_run(self) -> bool:
        """Return whether there are any, and the team was not reset since they were made."""
        forecasts = [forecast for _, forecast in self._links.values()]
        return bool(forecasts) and all(one.is_of_this_run for one in forecasts)

    def end(self, agent: str, reason: str) -> None:
        """End the link to an agent, if there is one."""
        if agent in self._links:
            self._links.pop(agent)[0].end(reason)

    def end_all(self, reason: str) -> None:
        """End every link."""
        for agent in list(self._links):
            self.end(agent, reason)

    def end_idle(self, possible: set[str]) -> None:
        """End links to all agents but these, if these alone were possible the last time, too.

        A manager that is just asking several agents to speak has not asked all of them yet.
        """
        idle = self._links.keys() - possible
        for name in idle & self._idle:
            self.end(name, "unused")
        self._idle = idle

    def unsure(self) -> Iterable[Link]:
        """Return the links to agents that may but need not be next."""
        return [link for link, forecast in self._links.values() if not forecast.turn.sure]


class KvShare:
    """The share of engines' KV pools that links get which may never be used.

    Args:
        share: of each engine's KV pool, between 0 and 1.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        # Tokens, by the engine's URL.
        self._pools: dict[str, int] = {}

    async def has_room(self, engine: EngineClient, prompt: Prompt, others: Iterable[Link]) -> bool:
        """Return whether a prompt fits beside those of other such links.

        Raises: EngineError.
        """
        if engine.url not in self._pools:
            self._pools[engine.url] = sum(rank.total for rank in (await engine.info()).kv)
        there = [one for one in others if one.engine.url == engine.url and not one.is_over]
        characters = sum(len(one.stable()) for one in [*(link.prompt for link in there), prompt])
        return characters <= _CHARACTERS_PER_TOKEN * self._share * self._pools[engine.url]


def _is_same(prompt: Prompt, other: Prompt) -> bool:
    return prompt.is_complete and other.is_complete and prompt.stable() == other.stable()
