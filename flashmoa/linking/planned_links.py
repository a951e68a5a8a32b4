"""Hold a planner's links, each with the forecast that it was made from (:class:`PlannedLinks`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from flashmoa.engine import EngineClient, MalformedRequest, PluginMissing, PromptTooLarge
from flashmoa.engine.connections import answering_soon
from flashmoa.linking.failure_policy import OnFailure
from flashmoa.linking.link import Link
from flashmoa.linking.placeholders import UNCERTAIN, NotForecastable, Placeholders
from flashmoa.linking.prompt import Prompt
from flashmoa.linking.prompt_feed import forget_plugin

_CHARACTERS_PER_TOKEN = 3

# Names of agents that write at the same time, and so finish in any order.
Step = frozenset[str]


@dataclass(frozen=True, slots=True)
class Turn:
    """A call that may come.

    Attributes:
        agent: the agent that makes it.
        after: the agents that write before it, in order, beginning with those that are writing now.
        sure: whether it is certain to come, unless the team ends before.
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
        engine: the engine that its request will be sent to.
        placeholders: the placeholders for texts in the prompt that are still being written.
        renders: functions that render the prompts which the request may have, a single one if that
            is certain. They raise EngineError.
        on_failure: what happens to a link to the prompt when a text in it fails.
        namespace: the namespace of the request's KV; by default the engine client's.
        expected_messages: number of messages that the agent was expected to receive before its
            turn, as far as known.
        received_since: returns the number of messages that the agent has received since the
            forecast, or ``None`` if its team was reset or the agent has had a turn. Without this
            function, the forecast always holds.
        holds: returns whether the same would be forecast now; without it, only ``received_since``
            is asked.
    """

    turn: Turn
    engine: EngineClient
    placeholders: Placeholders
    renders: Sequence[Callable[[], Awaitable[str]]]
    on_failure: OnFailure = "abort"
    namespace: Mapping[str, str] | None = None
    expected_messages: int = 0
    received_since: Callable[[], int | None] | None = None
    holds: Callable[[], bool] | None = None

    @property
    def is_of_this_run(self) -> bool:
        """Whether, since this forecast, the team was not reset and the agent had no turn."""
        return self.received_since is None or self.received_since() is not None

    async def prompt(self) -> Prompt:
        """Build the prompt.

        Raises:
            NotForecastable: if it cannot be rendered ahead, for instance because of images.
            EngineError: if the engine cannot render it for another reason.
        """
        try:
            texts = [await render() for render in self.renders]
        except (MalformedRequest, PromptTooLarge) as refusal:
            raise NotForecastable(f"its prompt cannot be rendered ahead: {refusal}") from refusal
        return self.placeholders.build_prompt(*texts)


class PlannedLinks:
    """Holds links and their forecasts, by the name of the agent linked to.

    Args:
        streams: whether text is streamed into the links.
    """

    def __init__(self, *, streams: bool) -> None:
        self._streams = streams
        self._links: dict[str, tuple[Link, Forecast]] = {}
        # Agents that could not be next at the last call of end_idle().
        self._idle: set[str] = set()

    def all(self) -> list[Link]:
        """Return every link."""
        return [link for link, _ in self._links.values()]

    def waiting_for(self, agent: str) -> list[Link]:
        """Return the links whose prompts have an open slot for this agent's text."""
        return [link for link in self.all() if link.waits_for(agent)]

    def add(self, link: Link, forecast: Forecast) -> None:
        """Add a link that was made from a forecast."""
        self._links[forecast.turn.agent] = link, forecast

    def take(self, agent: str, url: str) -> Link | None:
        """Remove the link for a call of an agent to the engine at ``url``, and return it.

        A link that was made for a different call is ended instead, and ``None`` returned.
        """
        link, forecast = self._links.pop(agent, (None, None))
        if link is None or forecast is None:
            return link
        if link.engine.url == url and self._is_as_forecast(link, forecast):
            return link
        link.end("mispredicted")
        return None

    def _is_as_forecast(self, link: Link, forecast: Forecast) -> bool:
        """Return whether an agent that calls its model has received the messages of the forecast.

        It has not if the team was stopped before that, and was run again or reset.
        """
        if forecast.received_since is None:
            return True
        received = forecast.received_since()
        if received is None or not self._streams:
            return received is not None
        if link.prompt.is_complete:
            return received == forecast.expected_messages
        return received >= len({slot.name for slot in link.prompt.slots if not slot.is_open})

    def fits(self, turn: Turn) -> bool:
        """Return whether there is a link for a turn whose forecast still holds."""
        link, forecast = self._links.get(turn.agent, (None, None))
        if link is None or forecast is None or (link.is_over and self._streams):
            return False
        if forecast.holds is not None:
            return forecast.holds()
        if forecast.received_since is None:
            return True
        received = forecast.received_since()
        if received is None or not self._streams:
            return received is not None
        if received == 0 and forecast.turn == turn:
            return True
        awaited = {slot.name for slot in link.prompt.slots if slot.is_open}
        if UNCERTAIN in awaited:
            return False
        most = forecast.expected_messages - len(awaited)
        return awaited == set(turn.writers) and received <= most

    def extend(self, prompt: Prompt, forecast: Forecast) -> Link | None:
        """Update the link to an agent by a newer forecast, in which more text is certain.

        Return the link. Return ``None`` if there is none, or if it had to be ended because the new
        prompt does not begin with the text that was sent.
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

    def has_expired(self, agent: str, prompt: Prompt) -> bool:
        """Return whether no request came in time for a link to this prompt of an agent."""
        link, _ = self._links.get(agent, (None, None))
        return link is not None and link.has_expired and _is_same(link.prompt, prompt)

    def are_of_this_run(self) -> bool:
        """Return whether there are links and the team was not reset since they were made."""
        forecasts = [forecast for _, forecast in self._links.values()]
        return bool(forecasts) and all(forecast.is_of_this_run for forecast in forecasts)

    def end(self, agent: str, reason: str) -> None:
        """End the link to an agent, if there is one."""
        if agent in self._links:
            self._links.pop(agent)[0].end(reason)

    def end_all(self, reason: str) -> None:
        """End every link."""
        for agent in list(self._links):
            self.end(agent, reason)

    def end_idle(self, possible: set[str]) -> None:
        """End the links to agents that are missing from ``possible`` for the second time in a row.

        Once is not enough, since a manager asks several agents to speak one after the other.
        """
        idle = self._links.keys() - possible
        for name in idle & self._idle:
            self.end(name, "unused")
        self._idle = idle

    def uncertain(self) -> Iterable[Link]:
        """Return the links to agents that may but need not be next."""
        return [link for link, forecast in self._links.values() if not forecast.turn.sure]


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


class KvShare:
    """Limits the KV of links that may never be used, to a share of each engine's KV pool.

    Args:
        share: the share, between 0 and 1.

    Raises: ValueError if it is not.
    """

    def __init__(self, share: float) -> None:
        if not _is_share(share):
            raise ValueError(f"kv_share is {share!r}; it must be a number from 0 to 1")
        self._share = share
        # Sizes of the KV pools in tokens, by the engine's URL.
        self._pools: dict[str, int] = {}

    async def why_no_room(
        self, engine: EngineClient, prompt: Prompt, others: Iterable[Link]
    ) -> str | None:
        """Return why there can be no link to a prompt that may never come; ``None`` if there can.

        Raises: EngineError, see :meth:`has_room`.
        """
        try:
            if await self.has_room(engine, prompt, others):
                return None
        except PluginMissing:
            forget_plugin(engine.url)
            return (
                "its engine has no plugin; only prompts that are sure to come are prefilled there"
            )
        return (
            "the share of the KV pool for links that may go unused is taken by agents that are "
            "likelier to speak"
        )

    async def has_room(self, engine: EngineClient, prompt: Prompt, others: Iterable[Link]) -> bool:
        """Return whether a prompt fits into an engine's share alongside the prompts of ``others``.

        Raises: EngineError if the engine does not report the size of its KV pool.
        """
        if engine.url not in self._pools:
            async with answering_soon(engine.url):
                info = await engine.info()
            self._pools[engine.url] = sum(rank.total for rank in info.kv)
        links = [link for link in others if link.engine.url == engine.url and not link.is_over]
        prompts = [*(link.prompt for link in links), prompt]
        characters = sum(len(other.stable()) for other in prompts)
        return characters <= _CHARACTERS_PER_TOKEN * self._share * self._pools[engine.url]


def _is_same(prompt: Prompt, other: Prompt) -> bool:
    return prompt.is_complete and other.is_complete and prompt.stable() == other.stable()
