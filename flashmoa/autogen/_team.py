"""Linking a team."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from autogen_agentchat.agents import SocietyOfMindAgent
from autogen_agentchat.teams import BaseGroupChat

from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.autogen._outlook import Outlook, Settings
from flashmoa.autogen._parts import Parts
from flashmoa.autogen._roster import Roster
from flashmoa.autogen._shadows import client_of
from flashmoa.autogen._turn import RunningTurn
from flashmoa.failures import FailurePolicy, OnFailure
from flashmoa.observe import Listener, contained, ignore

logger = logging.getLogger(__name__)

# The link of a team lives and dies with it.
_LINK = "_flashmoa_link"
_KV_SHARE = 0.5


def link(
    team: BaseGroupChat,
    *,
    stream: bool = True,
    on_failure: OnFailure | Mapping[str, OnFailure] | None = None,
    kv_share: float = _KV_SHARE,
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
            stock ``AssistantAgent``, alone or in a ``MessageFilterAgent``, run unlinked.
        stream: ``False`` prefills only what is known beforehand, and streams no tokens.
        on_failure: what becomes of a link whose upstream agent fails; for all, or by the names
            of the agents linked to. By default as the agent's client has it.
        kv_share: of an engine's KV pool, for agents that may speak next but need not.
        listener: is told everything that happens.

    Raises:
        TypeError: not a team that can be linked.
        ValueError: no agent of the team uses a FlashMoA client, or there is no agent or no
            action of such a name as ``on_failure`` has.
    """
    parts = _parts(team)
    settings = Settings("text" if stream else "known", _policies(on_failure, parts), kv_share)
    return TeamLink(parts, settings, contained(listener))


def watch(team: BaseGroupChat, listener: Listener) -> TeamLink:
    """Tell ``listener`` about a team's calls and link nothing; to compare with.

    Raises: as :func:`link`.
    """
    return TeamLink(_parts(team), Settings("nothing", None, 0.0), contained(listener))


def link_caller(listener: Listener) -> None:
    """Link the team on whose behalf a client is being called, if there is one (``auto_link``)."""
    parts = Parts.of_caller()
    if parts is not None and not hasattr(parts.owner, _LINK):
        TeamLink(parts, Settings("text", None, _KV_SHARE), listener)


class TeamLink:
    """The links of one team and of those within it; made by :func:`link`.

    It ends with its clients, or by itself.
    """

    def __init__(self, parts: Parts, settings: Settings, listener: Listener) -> None:
        self._clients = _clients(parts)
        self._inner = [TeamLink(one, settings, listener) for one in _within(parts)]
        if not self._clients and not self._inner:
            raise ValueError(
                "no agent of this team uses FlashMoAChatCompletionClient; there is nothing to link"
            )
        roster = Roster(parts)
        self._name_of = roster.name_of
        self._outlook = Outlook(roster, settings, listener)
        before: TeamLink | None = getattr(parts.owner, _LINK, None)
        if before is not None:
            before._retire()
        setattr(parts.owner, _LINK, self)
        for client in self._clients:
            client.add_watcher(self)

    async def close(self) -> None:
        """End every link and wait until their engines have the KV back; the team runs on."""
        self._retire()
        await self._outlook.host.close()
        for inner in self._inner:
            await inner.close()

    def begin(
        self, agent_type: str, agent_key: str, engine_url: str, held: str | None
    ) -> RunningTurn | None:
        """A client is about to send a request, maybe for one of this team's agents."""
        name = self._name_of(agent_type, agent_key)
        if name is None:
            return None
        try:
            return self._outlook.begin(name, engine_url, held)
        except Exception:
            # Whatever is wrong with a link, the agent's call goes out.
            logger.exception("%s runs unlinked", name)
            return None

    def _retire(self) -> None:
        for client in self._clients:
            client.remove_watcher(self)
        self._outlook.end_all("closed")


def _parts(team: Any) -> Parts:
    if not isinstance(team, BaseGroupChat):
        raise TypeError(f"only a team can be linked, not a {type(team).__name__}")
    return Parts.of(team)


def _policies(
    given: OnFailure | Mapping[str, OnFailure] | None, parts: Parts
) -> FailurePolicy | dict[str, FailurePolicy] | None:
    if given is None or not isinstance(given, Mapping):
        return None if given is None else FailurePolicy.of(given)
    names = _names(parts)
    if unknown := [name for name in given if name not in names]:
        raise ValueError(f"on_failure names {unknown}; the team has {sorted(names)}")
    return {name: FailurePolicy.of(one) for name, one in given.items()}


def _names(parts: Parts) -> set[str]:
    return {one.name for one in parts.participants}.union(*map(_names, _within(parts)))


def _clients(parts: Parts) -> set[FlashMoAChatCompletionClient]:
    """The clients that a team's agents and its manager call."""
    callers = [parts.owner, *parts.participants]
    return {client for one in callers if (client := client_of(one)) is not None}


def _within(parts: Parts) -> list[Parts]:
    """Teams within a team that have something to link."""
    members = parts.participants
    inner = [one._team if isinstance(one, SocietyOfMindAgent) else one for one in members]
    found = [Parts.of(one) for one in inner if isinstance(one, BaseGroupChat)]
    return [one for one in found if _clients(one) or _within(one)]
