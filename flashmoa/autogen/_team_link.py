"""Link a team's agents (``link``), or only report their calls (``watch``)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from autogen_agentchat.agents import SocietyOfMindAgent
from autogen_agentchat.teams import BaseGroupChat

from flashmoa._concurrency import all_of
from flashmoa.autogen._callers import calling_agent
from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.autogen._link_planner import Settings, TeamLinkPlanner
from flashmoa.autogen._stock import client_of
from flashmoa.autogen._team_members import TeamMembers, TeamParts
from flashmoa.linking.calls import CallRequest, LinkedTeam
from flashmoa.linking.failure_policy import FailurePolicy, OnFailure
from flashmoa.linking.planner import LinkedCall
from flashmoa.observe import Listener, contained, ignore
from flashmoa.observe.trace import add_trace, end_trace

logger = logging.getLogger(__name__)

# The attribute of a team that holds its link, so that both live equally long.
_LINK_ATTRIBUTE = "_flashmoa_link"
_KV_SHARE = 0.5


def link(  # noqa: PLR0913 - all but the team have a default
    team: BaseGroupChat,
    *,
    stream: bool = True,
    on_failure: OnFailure | Mapping[str, OnFailure] | None = None,
    kv_share: float = _KV_SHARE,
    include: Collection[str] = (),
    trace: Path | str | None = None,
    trace_prompts: bool = False,
    listener: Listener = ignore,
) -> TeamLink:
    """Link a team's agents: each one's tokens stream into the prompts of those after it.

    Call it once after building the team; runs, prompts and answers stay the same. The known parts
    of every later prompt (system prompt, tools, task) are prefilled as soon as the team starts.
    Teams within the team are linked, too. Linking a team again replaces the first link.

    Args:
        team: a ``RoundRobinGroupChat``, ``GraphFlow``, ``SelectorGroupChat``, ``Swarm`` or
            ``MagenticOneGroupChat``. Its agents' model clients must be
            ``FlashMoAChatCompletionClient``. These agents run unlinked: agents with other clients,
            agents that are not a stock ``AssistantAgent`` (alone or in a ``MessageFilterAgent``),
            and agents that override methods which build their prompts. Linking runs no code but
            AutoGen's own.
        stream: ``False`` prefills only what is known beforehand, and streams no tokens.
        on_failure: what happens to a link whose upstream agent fails; one policy for all links, or
            one for each agent linked to, by its name. By default the policy of the agent's client.
        kv_share: the share of an engine's KV pool for agents that may speak next but need not.
        include: names of agents to link although they are of user-defined classes, or hold a
            user-defined workbench, tool or client. To predict its next prompt, such an agent is
            run on a copy, up to its model call. It must keep its model client as ``_model_client``,
            send others exactly its model's text, and change nothing before the call but its own
            lists, dicts, sets and contexts.
        trace: a file to write all events to, for ``flashmoa trace``, which also makes a page of
            it; an existing trace is replaced, unless another link is writing it.
        trace_prompts: whether to write the prompts of calls, too. ``flashmoa trace`` and
            ``flashmoa doctor --trace`` then say why prefixes broke.
        listener: receives all events.

    Raises:
        TypeError: if ``team`` is not a team that can be linked, or ``include`` is a string.
        OSError: if the trace cannot be written.
        ValueError: if no agent of the team uses a FlashMoA client; if ``on_failure`` or
            ``include`` names an unknown agent or action, or an agent that cannot be linked; if
            ``kv_share`` is not between 0 and 1; if
            ``trace`` names an HTML page, or an existing file that is not a trace; if
            ``trace_prompts`` is given without ``trace``.
    """
    parts = _get_parts(team)
    policies = _make_policies(on_failure, parts)
    _check_included(include, parts)
    settings = Settings("text" if stream else "known", policies, kv_share, frozenset(include))
    previous: TeamLink | None = getattr(parts.owner, _LINK_ATTRIBUTE, None)
    listener = add_trace(
        listener,
        trace,
        prompts=trace_prompts,
        successor_of=previous.owned_listener if previous is not None else None,
    )
    return TeamLink(parts, settings, listener)


def watch(team: BaseGroupChat, listener: Listener) -> TeamLink:
    """Report a team's calls to ``listener`` and link nothing; to compare with a linked team.

    Raises: TypeError, ValueError; see :func:`link`.
    """
    return TeamLink(_get_parts(team), Settings("nothing", None, 0.0), contained(listener))


def link_caller(listener: Listener) -> None:
    """Link the team on whose behalf a client is being called, if there is one (``auto_link``)."""
    parts = TeamParts.of_caller()
    if parts is None or hasattr(parts.owner, _LINK_ATTRIBUTE):
        return
    if _find_clients(parts) or _find_inner_teams(parts):
        TeamLink(parts, Settings("text", None, _KV_SHARE), listener)


class TeamLink(LinkedTeam):
    """Links one team and the teams within it, until it or the team's clients are closed.

    Use :func:`link` to make one.

    Attributes:
        owned_listener: receives its events; ``None`` for a team within a linked team, whose events
            go to the listener of that one.
    """

    def __init__(
        self, parts: TeamParts, settings: Settings, listener: Listener, *, is_inner: bool = False
    ) -> None:
        self.owned_listener = None if is_inner else listener
        self._clients = _find_clients(parts)
        inner = {
            (team.reader or team.owner).name: TeamLink(team, settings, listener, is_inner=True)
            for team in _find_inner_teams(parts)
        }
        self._inner = list(inner.values())
        if not self._clients and not self._inner:
            raise ValueError(
                "no agent of this team uses FlashMoAChatCompletionClient; there is nothing to "
                "link. Give the agents one as model_client."
            )
        self._members = TeamMembers(parts, settings.include)
        inner_planners = {name: link._planner for name, link in inner.items()}
        self._planner = TeamLinkPlanner(self._members, settings, listener, inner_planners)
        previous: TeamLink | None = getattr(parts.owner, _LINK_ATTRIBUTE, None)
        if previous is not None:
            previous._retire()
        setattr(parts.owner, _LINK_ATTRIBUTE, self)
        for client in self._clients:
            client.add_team(self)

    async def close(self) -> None:
        """End every link and wait until the engines have their KV back; the team can still run."""
        self._retire()
        await all_of([self._planner.host.close, *(inner.close for inner in self._inner)])

    def observe(self, request: CallRequest) -> LinkedCall | None:
        """Return the observer of a request, if it is made for one of this team's agents."""
        agent = calling_agent()
        name = self._members.name_of(agent) if agent is not None else None
        if name is None:
            return None
        try:
            if not self._members.is_own_call(name):
                return None
            rewritten = self._members.why_rewritten(name)
            return self._planner.begin(name, request, rewritten=rewritten)
        except Exception:
            # Whatever is wrong with a link, the agent's call must be made.
            logger.exception("%s runs unlinked because of the error below", name)
            return None

    def _retire(self) -> None:
        for client in self._clients:
            client.remove_team(self)
        self._planner.end_all("closed")
        if self.owned_listener is not None:
            end_trace(self.owned_listener)


def _get_parts(team: Any) -> TeamParts:
    if not isinstance(team, BaseGroupChat):
        raise TypeError(
            f"only a team can be linked, not a {type(team).__name__}; give an AgentChat team, "
            "RoundRobinGroupChat for example"
        )
    return TeamParts.of(team)


def _make_policies(
    given: OnFailure | Mapping[str, OnFailure] | None, parts: TeamParts
) -> FailurePolicy | dict[str, FailurePolicy] | None:
    if given is None or not isinstance(given, Mapping):
        return None if given is None else FailurePolicy.of(given)
    _find_agents(given, parts, "on_failure")
    return {name: FailurePolicy.of(policy) for name, policy in given.items()}


def _check_included(names: Collection[str], parts: TeamParts) -> None:
    if isinstance(names, str):
        raise TypeError(f"include is {names!r}; it must be a list of names, as [{names!r}]")
    for name, agent in _find_agents(names, parts, "include").items():
        if client_of(agent) is None:
            raise ValueError(
                f"include names {name}, which has no FlashMoAChatCompletionClient as its "
                f"_model_client; keep the client there, or leave {name} out"
            )


def _find_agents(names: Iterable[str], parts: TeamParts, argument: str) -> dict[str, Any]:
    """Return the agents with these names. Raises: ValueError if the team lacks one of them."""
    agents = _all_agents(parts)
    if unknown := [name for name in names if name not in agents]:
        raise ValueError(f"{argument} names {unknown}; the team has {sorted(agents)}")
    return {name: agents[name] for name in names}


def _all_agents(parts: TeamParts) -> dict[str, Any]:
    """Return the agents of a team and of the teams within it, by their names."""
    agents = {agent.name: agent for agent in parts.participants}
    for inner in _find_inner_teams(parts):
        agents |= _all_agents(inner)
    return agents


def _find_clients(parts: TeamParts) -> set[FlashMoAChatCompletionClient]:
    """Return the clients that a team's agents and its manager call."""
    callers = [parts.owner, *parts.participants]
    return {client for caller in callers if (client := client_of(caller)) is not None}


def _find_inner_teams(parts: TeamParts) -> list[TeamParts]:
    """Return the teams within a team that have an agent or a team to link."""
    inner: list[TeamParts] = []
    for member in parts.participants:
        reader = member if isinstance(member, SocietyOfMindAgent) else None
        team = member if reader is None else reader._team
        if isinstance(team, BaseGroupChat):
            inner.append(TeamParts.of(team, reader))
    return [team for team in inner if _find_clients(team) or _find_inner_teams(team)]
