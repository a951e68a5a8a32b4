"""Linking a team."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from autogen_agentchat.agents import SocietyOfMindAgent
from autogen_agentchat.teams import BaseGroupChat

from flashmoa._concurrency import all_of
from flashmoa.autogen._call_observers import calling_agent
from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.autogen._link_planner import Settings, TeamLinkPlanner
from flashmoa.autogen._stock import client_of
from flashmoa.autogen._team_members import TeamMembers
from flashmoa.autogen._team_parts import TeamParts
from flashmoa.linking.failure_policy import FailurePolicy, OnFailure
from flashmoa.linking.linked_call import LinkedCall
from flashmoa.linking.observed_call import CallRequest, LinkedTeam
from flashmoa.observe import Listener, both, contained, ignore
from flashmoa.observe.trace import Trace

logger = logging.getLogger(__name__)

# The link of a team lives and dies with it.
_LINK = "_flashmoa_link"
_KV_SHARE = 0.5


def link(  # noqa: PLR0913 - all but the team have a default
    team: BaseGroupChat,
    *,
    stream: bool = True,
    on_failure: OnFailure | Mapping[str, OnFailure] | None = None,
    kv_share: float = _KV_SHARE,
    include: Collection[str] = (),
    trace: Path | str | None = None,
    listener: Listener = ignore,
) -> TeamLink:
    """Link a team's agents: each one's tokens stream into the prompts of those after it.

    One call after building the team is all; runs, prompts and answers stay the same. What is
    known of every later prompt (system prompt, tools, task) is prefilled as soon as the team
    starts. Teams within the team are linked, too. Linking a team again replaces the first link.

    Args:
        team: a ``RoundRobinGroupChat``, ``GraphFlow``, ``SelectorGroupChat``, ``Swarm`` or
            ``MagenticOneGroupChat``. Its agents' model clients must be
            ``FlashMoAChatCompletionClient``; agents with other clients, and agents that are no
            stock ``AssistantAgent``, alone or in a ``MessageFilterAgent``, or override what
            builds its prompts, run unlinked: no code but AutoGen's own is run to link.
        stream: ``False`` prefills only what is known beforehand, and streams no tokens.
        on_failure: what happens to a link whose upstream agent fails; for all, or by the names of
            the agents linked to. By default as the agent's client has it.
        kv_share: the share of an engine's KV pool for agents that may speak next but need not.
        include: names of agents of your own classes that are to be linked, too, or that hold a
            workbench, tool or client of your own. Such an agent keeps its model client as
            ``_model_client``, sends others the text its model answers with, and up to that call
            changes nothing but its own lists, dicts, sets and contexts: to tell its next prompt,
            it is run up to there on a copy.
        trace: a file that all events are written to, for ``flashmoa trace``, which also makes a
            page of it; an existing file is replaced.
        listener: receives all events.

    Raises:
        TypeError: not a team that can be linked.
        OSError: the trace cannot be written.
        ValueError: no agent of the team uses a FlashMoA client; ``on_failure`` or ``include``
            names an unknown agent or action, or an agent that cannot be linked; ``trace`` names
            an HTML page.
    """
    parts = _parts(team)
    policies = _policies(on_failure, parts)
    _check_included(include, parts)
    settings = Settings("text" if stream else "known", policies, kv_share, frozenset(include))
    if trace is not None:
        listener = both(contained(Trace(trace)), contained(listener))
    return TeamLink(parts, settings, contained(listener))


def watch(team: BaseGroupChat, listener: Listener) -> TeamLink:
    """Report a team's calls to ``listener`` and link nothing; to compare with.

    Raises: as :func:`link`.
    """
    return TeamLink(_parts(team), Settings("nothing", None, 0.0), contained(listener))


def link_caller(listener: Listener) -> None:
    """Link the team on whose behalf a client is being called, if there is one (``auto_link``)."""
    parts = TeamParts.of_caller()
    if parts is None or hasattr(parts.owner, _LINK):
        return
    if _clients(parts) or _within(parts):
        TeamLink(parts, Settings("text", None, _KV_SHARE), listener)


FlashMoAChatCompletionClient.link_caller = link_caller


class TeamLink(LinkedTeam):
    """The links of one team and of those within it; made by :func:`link`.

    It ends with its clients, or by itself.
    """

    def __init__(self, parts: TeamParts, settings: Settings, listener: Listener) -> None:
        self._clients = _clients(parts)
        within = {
            (one.reader or one.owner).name: TeamLink(one, settings, listener)
            for one in _within(parts)
        }
        self._inner = list(within.values())
        if not self._clients and not self._inner:
            raise ValueError(
                "no agent of this team uses FlashMoAChatCompletionClient; there is nothing to link"
            )
        self._members = TeamMembers(parts, settings.include)
        inner = {name: one._planner for name, one in within.items()}
        self._planner = TeamLinkPlanner(self._members, settings, listener, inner)
        before: TeamLink | None = getattr(parts.owner, _LINK, None)
        if before is not None:
            before._retire()
        setattr(parts.owner, _LINK, self)
        for client in self._clients:
            client.observers.add(self)

    async def close(self) -> None:
        """End every link and wait until their engines have the KV back; the team runs on."""
        self._retire()
        await all_of([self._planner.host.close, *(inner.close for inner in self._inner)])

    def observe(self, request: CallRequest) -> LinkedCall | None:
        """Return the observer of a request, if it is made for one of this team's agents."""
        agent = calling_agent()
        name = self._members.name_of(agent) if agent is not None else None
        if name is None:
            return None
        try:
            if not self._members.calls_itself(name):
                return None
            rewritten = self._members.rewrites(name)
            return self._planner.begin(name, request, rewrite_reason=rewritten)
        except Exception:
            # Whatever is wrong with a link, the agent's call goes out.
            logger.exception("%s runs unlinked", name)
            return None

    def _retire(self) -> None:
        for client in self._clients:
            client.observers.remove(self)
        self._planner.end_all("closed")


def _parts(team: Any) -> TeamParts:
    if not isinstance(team, BaseGroupChat):
        raise TypeError(f"only a team can be linked, not a {type(team).__name__}")
    return TeamParts.of(team)


def _policies(
    given: OnFailure | Mapping[str, OnFailure] | None, parts: TeamParts
) -> FailurePolicy | dict[str, FailurePolicy] | None:
    if given is None or not isinstance(given, Mapping):
        return None if given is None else FailurePolicy.of(given)
    _members(given, parts, "on_failure")
    return {name: FailurePolicy.of(one) for name, one in given.items()}


def _check_included(names: Collection[str], parts: TeamParts) -> None:
    for name, agent in _members(names, parts, "include").items():
        if client_of(agent) is None:
            raise ValueError(f"{name} keeps no FlashMoAChatCompletionClient as its _model_client")


def _members(names: Iterable[str], parts: TeamParts, argument: str) -> dict[str, Any]:
    """Return the agents of these names. Raises: ValueError for a name the team does not have."""
    agents = _all_agents(parts)
    if unknown := [name for name in names if name not in agents]:
        raise ValueError(f"{argument} names {unknown}; the team has {sorted(agents)}")
    return {name: agents[name] for name in names}


def _all_agents(parts: TeamParts) -> dict[str, Any]:
    """Return the agents of a team and of the teams within it, by their names."""
    agents = {one.name: one for one in parts.participants}
    for inner in _within(parts):
        agents |= _all_agents(inner)
    return agents


def _clients(parts: TeamParts) -> set[FlashMoAChatCompletionClient]:
    """Return the clients that a team's agents and its manager call."""
    callers = [parts.owner, *parts.participants]
    return {client for one in callers if (client := client_of(one)) is not None}


def _within(parts: TeamParts) -> list[TeamParts]:
    """Return the teams within a team that have something to link."""
    inner: list[TeamParts] = []
    for one in parts.participants:
        team = one._team if isinstance(one, SocietyOfMindAgent) else one
        if isinstance(team, BaseGroupChat):
            inner.append(TeamParts.of(team, one if isinstance(one, SocietyOfMindAgent) else None))
    return [one for one in inner if _clients(one) or _within(one)]
