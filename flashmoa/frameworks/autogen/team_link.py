"""Link a team's agents (``link``)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import anyio
from autogen_agentchat.agents import SocietyOfMindAgent
from autogen_agentchat.teams import BaseGroupChat
from autogen_core import AgentId

from flashmoa._concurrency import all_of
from flashmoa.frameworks.autogen.calls import ToolAnswer, observe_tools
from flashmoa.frameworks.autogen.client import FlashMoAChatCompletionClient
from flashmoa.frameworks.autogen.dry_run import client_of
from flashmoa.frameworks.autogen.team_members import MANAGER, SUMMARY, TeamMembers, TeamParts
from flashmoa.link.after_tools import RequestAfterTools
from flashmoa.link.calls import CallRequest, CallResult
from flashmoa.link.expected import ChatRequest, ExpectedRequest, Turn
from flashmoa.link.link import Link
from flashmoa.link.linked_team import LinkedTeam, link_of, listen_for
from flashmoa.link.options import LinkOptions, LinkSettings, check_names
from flashmoa.link.planner import DELIVERY_SECONDS, END_POLL_SECONDS, LinkedCall, LinkPlanner
from flashmoa.link.prompt import UNCERTAIN, Placeholders, Prompt
from flashmoa.observe import Listener
from flashmoa.observe.report import Report

# Links for a team's next run are kept for this time after the end of its run. The first run gets no
# such links, because programs often make a team for each request.
_NEXT_RUN_SECONDS = 10.0


def link(
    team: BaseGroupChat,
    *,
    kv_share: float = 0.5,
    include: Collection[str] = (),
    **options: Unpack[LinkOptions],
) -> TeamLink:
    """Link a team's agents: each agent's tokens stream into the prompts of agents after it.

    Call it once after building the team; runs, prompts and answers stay the same. Engines prefill
    the known parts of every later prompt (system prompt, tools, task) as soon as the team starts.
    Teams within the team are linked, too. Linking a team again replaces the first link.

    Args:
        team: a ``RoundRobinGroupChat``, ``GraphFlow``, ``SelectorGroupChat``, ``Swarm`` or
            ``MagenticOneGroupChat``. Its agents' model clients must be
            ``FlashMoAChatCompletionClient``. These agents run unlinked: agents with other clients,
            agents that are not a stock ``AssistantAgent`` (alone or in a ``MessageFilterAgent``),
            and agents that override methods which build their prompts. Linking only runs AutoGen's
            own code.
        kv_share: the share of an engine's KV pool for agents that may speak next but need not.
            Only a team that chooses its speakers has such agents.
        include: names of agents to link although their classes are user-defined, or they have a
            user-defined workbench, tool or client. To predict its next prompt, a copy of such an
            agent is run up to its model call. The agent must keep its model client as
            ``_model_client``, send others exactly its model's text, and before the call change
            only its own lists, dicts, sets and contexts.
        options: see :class:`flashmoa.LinkOptions`, also for exceptions.

    Raises:
        TypeError: if ``team`` is not a team that can be linked, or ``include`` is a string.
        ValueError: if no agent of the team uses a FlashMoA client; if ``on_failure`` or
            ``include`` names an unknown agent, or one that cannot be linked; if ``kv_share`` is
            not between 0 and 1.
    """
    if not isinstance(team, BaseGroupChat):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"only a team can be linked, not a {type(team).__name__}; give an AgentChat team, "
            "RoundRobinGroupChat for example"
        )
    parts = TeamParts.of(team)
    settings = TeamSettings(**options, kv_share=kv_share, include=include)
    settings.check_agents(_all_agents(parts))
    _check_included(include, parts)
    return TeamLink(parts, settings, listen_for(parts.owner, settings))


def link_caller(**options: Unpack[LinkOptions]) -> None:
    """Link the team whose agent is calling its client, unless it is linked (``auto_link``)."""
    parts = TeamParts.of_caller()
    if parts is None or link_of(parts.owner) is not None:
        return
    if _find_clients(parts) or _find_inner_teams(parts):
        settings = TeamSettings(**options)
        TeamLink(parts, settings, settings.listen())


FlashMoAChatCompletionClient._link_caller = staticmethod(link_caller)


class TeamLink(LinkedTeam["TeamLinkPlanner"]):
    """Links a team and the teams within it, until it or the team's clients are closed.

    Use :func:`link` to make one.

    Args:
        outer: the report of the linked team around this team, if there is one.
    """

    def __init__(
        self,
        parts: TeamParts,
        settings: TeamSettings,
        listener: Listener,
        *,
        outer: Report | None = None,
    ) -> None:
        report = Report(listener) if outer is None else outer
        clients = _find_clients(parts)
        inner = {
            (team.reader or team.owner).name: TeamLink(team, settings, listener, outer=report)
            for team in _find_inner_teams(parts)
        }
        self._inner = list(inner.values())
        if not clients and not self._inner:
            raise ValueError(
                "no agent of this team uses FlashMoAChatCompletionClient; there is nothing to "
                "link. Give the agents one as model_client."
            )
        self._members = TeamMembers(parts, settings.include)
        inner_planners = {name: link._planner for name, link in inner.items()}
        planner = TeamLinkPlanner(self._members, settings, report, inner_planners)
        observed = [client.linked_teams for client in clients]
        super().__init__(
            parts.owner, observed, planner, report, listener if outer is None else None
        )

    async def close(self) -> None:
        await all_of([super().close, *(inner.close for inner in self._inner)])

    def _find_name(self, caller: AgentId) -> str | None:
        return self._members.name_of(caller)

    def _begin(self, name: str, request: CallRequest) -> LinkedCall | None:
        if not self._members.is_own_call(name):
            return None
        return self._planner.begin(name, request, rewritten=self._members.why_rewritten(name))


def _check_included(names: Collection[str], parts: TeamParts) -> None:
    if isinstance(names, str):
        raise TypeError(f"include is {names!r}; it must be a list of names, as [{names!r}]")
    agents = _all_agents(parts)
    check_names("include", names, agents)
    for name in names:
        if client_of(agents[name]) is None:
            raise ValueError(
                f"include names {name}, which has no FlashMoAChatCompletionClient as its "
                f"_model_client; keep the client there, or leave {name} out"
            )


def _all_agents(parts: TeamParts) -> dict[str, Any]:
    """Return the agents of a team and of the teams within it, by their names."""
    agents = {agent.name: agent for agent in parts.participants}
    for inner in _find_inner_teams(parts):
        agents |= _all_agents(inner)
    return agents


def _find_clients(parts: TeamParts) -> set[FlashMoAChatCompletionClient]:
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


@dataclass(frozen=True)
class TeamSettings(LinkSettings):
    """Says how a team is linked; see :func:`flashmoa.autogen.link`."""

    kv_share: float = 0.5
    include: Collection[str] = ()


class TeamLinkPlanner(LinkPlanner):
    """Plans the links of a team.

    Args:
        inner: the planners of the teams within this team, by the name of the member (the inner team
            itself, or its ``SocietyOfMindAgent``).
    """

    def __init__(
        self,
        members: TeamMembers,
        settings: TeamSettings,
        listener: Listener,
        inner: Mapping[str, TeamLinkPlanner],
    ) -> None:
        super().__init__(listener, settings, kv_share=settings.kv_share)
        self._members = members
        self._inner = inner
        # The number of runs so far, and the last run until its end is noticed.
        self._runs = 0
        self._run: object = None

    @property
    def is_running(self) -> bool:
        return self._members.is_running

    def begin(
        self, agent: str, request: CallRequest, rewritten: str | None = None, linkable: bool = True
    ) -> LinkedCall:
        # A run may begin before the end of the previous run is noticed.
        run = self._members.current_run
        if run is not None and run is not self._run:
            self._run, self._runs, self._has_begun = run, self._runs + 1, False
        return super().begin(agent, request, rewritten, linkable)

    def why_unplanned(self, agent: str) -> str:
        unknown = self._members.unknown_manager
        if unknown and self._has_begun:
            return f"its team's {unknown} chooses speakers by rules that are not AutoGen's own"
        return super().why_unplanned(agent)

    async def upcoming(self, caller: str) -> Sequence[Turn]:
        turns = await self._members.upcoming(caller)
        # Teams within this one have their own planners.
        return [turn for turn in turns if turn.agent not in self._inner]

    async def expect(self, turn: Turn) -> ExpectedRequest:
        """Return the next request of a turn's agent, from dry runs of its code."""
        members, agent = self._members, turn.agent
        placeholders = Placeholders(turn.writers)
        futures = members.possible_futures(turn, placeholders)
        received_since, expected = members.count_received_since(agent), len(futures[0])

        def holds(prompt: Prompt, now: Turn | None) -> bool:
            received = received_since()
            if received is None or not self.streams:
                return received is not None
            if now is None:
                return has_received(received, expected, prompt)
            return (received == 0 and now == turn) or awaits(now, expected - received, prompt)

        requests: list[ChatRequest] = []
        for dry_run in members.dry_runs(agent):
            for future in futures:
                request = await dry_run(future)
                if request not in requests:
                    requests.append(request)
        return ExpectedRequest(turn, requests, placeholders, holds)

    def possible(self) -> set[str]:
        """Return the agents that the manager waits for, the inner teams, and ``SUMMARY``."""
        return self._members.active_speakers() | {SUMMARY} | self._inner.keys()

    def take_link(self, agent: str, url: str) -> Link | None:
        """Return the link to the prompt of a call that has arrived, and drop it here.

        The planner of the inner team has the link to a ``SocietyOfMindAgent``'s call.
        """
        inner = self._inner.get(agent)
        return super().take_link(agent, url) if inner is None else inner.take_link(SUMMARY, url)

    def call_answered(self, call: LinkedCall, result: CallResult) -> None:
        super().call_answered(call, result)
        if call.text.is_complete:
            self._plan_again(call)

    def _plan_again(self, call: LinkedCall) -> None:
        """Plan again after the delivery of the message, if a prompt depends on message order.

        Such a prompt is known up to the first text with an uncertain place, which moves on with
        each delivered message.
        """
        readers = [link.agent for link in self.waiting_for(UNCERTAIN)]
        counts = {name: len(self._members.received(name)) for name in readers if name != MANAGER}
        if counts:
            self.host.start(lambda: self._plan_when_delivered(call, counts))

    def request_after_tools(self, agent: str, answer: object) -> RequestAfterTools | None:
        """Return the agent's next request, if it will make one, and learn its tools' results."""
        if not isinstance(answer, ToolAnswer):
            return None
        request = self._members.own_request(agent, answer)
        if request is None:
            return None

        def learn(place: int, result: str | None) -> None:
            if result is None:
                self.tools.give_up(request)
            else:
                self.tools.add_result(request, request.tools[place], result)

        observe_tools()
        answer.called.on_result = learn
        return request

    async def _plan_when_delivered(self, call: LinkedCall, counts: Mapping[str, int]) -> None:
        """Plan again once every reader has received more messages than in ``counts``."""
        received = self._members.received
        with anyio.move_on_after(1.0):
            while not all(len(received(name)) > count for name, count in counts.items()):  # noqa: ASYNC110
                await anyio.sleep(DELIVERY_SECONDS)
        # The call's text is among the messages now: no link waits for it.
        self.drop_call(call)
        if self.running:
            self.caller = next(iter(self.running))
            self.plan()

    def run_ended(self) -> None:
        super().run_ended()
        self._run = None
        if self._runs > 1:
            self.host.start(self._link_next_run)

    async def _link_next_run(self) -> None:
        """Prefill the known parts of the next run's first prompts, in case it comes soon."""
        course = self._course
        turns = await self._members.first_turns()
        counts = [self._members.count_received_since(turn.agent) for turn in turns]
        await self.link_all([turn for turn in turns if turn.agent not in self._inner])
        with anyio.move_on_after(_NEXT_RUN_SECONDS):
            # A team that was reset starts over.
            while (  # noqa: ASYNC110
                list(self.links)
                and course is self._course
                and all(count() is not None for count in counts)
            ):
                await anyio.sleep(END_POLL_SECONDS)
        if course is self._course:
            self.end_all("unused")


def has_received(received: int, expected: int, prompt: Prompt) -> bool:
    """Return whether a calling agent has received the messages that its link expects.

    It has not if the team was stopped too early, and was then run again or reset.
    """
    if prompt.is_complete:
        return received == expected
    return received >= len({slot.name for slot in prompt.slots if not slot.is_open})


def awaits(turn: Turn, missing: int, prompt: Prompt) -> bool:
    """Return whether a prompt waits for exactly the writers of a turn.

    Args:
        missing: number of expected messages that the agent has not received.
    """
    awaited = {slot.name for slot in prompt.slots if slot.is_open}
    return UNCERTAIN not in awaited and awaited == set(turn.writers) and len(awaited) <= missing
