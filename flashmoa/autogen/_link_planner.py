"""The link planner of AutoGen's teams."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import anyio
from autogen_agentchat.messages import BaseChatMessage

from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.autogen._dry_run import DryRun, ModelCall
from flashmoa.autogen._self_hosted import render
from flashmoa.autogen._team_members import TeamMembers
from flashmoa.autogen._turn_order import MANAGER, SUMMARY
from flashmoa.linking.failure_policy import FailurePolicy
from flashmoa.linking.link import Ahead, Link
from flashmoa.linking.linked_call import LinkedCall
from flashmoa.linking.placeholders import UNCERTAIN, Placeholders
from flashmoa.linking.planned_links import Forecast, Turn
from flashmoa.linking.planner import DELIVERY_SECONDS, END_POLL_SECONDS, LinkPlanner
from flashmoa.observe import Listener

_LONGEST_DELIVERY = 1.0
# How long a team that has ended is waited for, to run again.
_NEXT_RUN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How a team is linked; see :func:`flashmoa.autogen.link`."""

    ahead: Ahead
    on_failure: FailurePolicy | Mapping[str, FailurePolicy] | None
    kv_share: float
    include: Collection[str] = ()

    def policy(self, agent: str, client: FlashMoAChatCompletionClient) -> FailurePolicy:
        """Return the policy of the link to an agent."""
        given = self.on_failure
        policy = given.get(agent) if isinstance(given, Mapping) else given
        return policy or client.on_failure


class TeamLinkPlanner(LinkPlanner):
    """The links of one team.

    Args:
        inner: the planners of teams that are members of this one, or whose
            ``SocietyOfMindAgent`` is, by the member's name.
    """

    def __init__(
        self,
        members: TeamMembers,
        settings: Settings,
        listener: Listener,
        inner: Mapping[str, TeamLinkPlanner],
    ) -> None:
        super().__init__(listener, ahead=settings.ahead, kv_share=settings.kv_share)
        self._members = members
        self._settings = settings
        self._inner = inner

    @property
    def is_running(self) -> bool:
        return self._members.is_running

    async def upcoming(self, caller: str) -> Sequence[Turn]:
        turns = await self._members.upcoming(caller)
        # Teams within this one have planners of their own.
        return [turn for turn in turns if turn.agent not in self._inner]

    async def forecast(self, turn: Turn) -> Forecast:
        """Return what the agent of a turn will send, told by dry runs of its own code."""
        members, agent = self._members, turn.agent
        client = members.client(agent)
        placeholders = Placeholders(turn.writers)
        futures = members.futures(turn, placeholders)
        received_since = members.received_since(agent)
        calls = await possible_calls(members.dry_runs(agent), futures)
        return Forecast(
            turn,
            client.engine,
            placeholders,
            [partial(render, client, call.messages, call.tools) for call in calls],
            on_failure=self._settings.policy(agent, client),
            expected_messages=len(futures[0]),
            received_since=received_since,
        )

    def possible(self) -> set[str]:
        """Return those whom the manager has asked to speak, and a reader of all that is said."""
        return self._members.speaking() | {SUMMARY} | self._inner.keys()

    def take_link(self, agent: str) -> Link | None:
        """Return the link to the prompt of a call that is here, and hold it no longer.

        A ``SocietyOfMindAgent`` is linked to by its own team, as the reader of what that says.
        """
        inner = self._inner.get(agent)
        return super().take_link(agent) if inner is None else inner.take_link(SUMMARY)

    def call_finished(self, call: LinkedCall) -> None:
        """Look again when a message has been delivered that others may follow in any order."""
        waiting = [link.agent for link in self.waiting_for(UNCERTAIN)]
        received = {one: len(self._members.received(one)) for one in waiting if one != MANAGER}
        if received:
            self.host.start(lambda: self._plan_when_delivered(call, received))

    async def _plan_when_delivered(self, call: LinkedCall, received: Mapping[str, int]) -> None:
        """Plan again once every agent that waits has received more messages than these."""
        now = self._members.received
        with anyio.move_on_after(_LONGEST_DELIVERY):
            while not all(len(now(name)) > count for name, count in received.items()):  # noqa: ASYNC110
                await anyio.sleep(DELIVERY_SECONDS)
        self.call_failed(call)  # It is among the messages, and no longer to be waited for.
        if self._run.running:
            self._run.caller = next(iter(self._run.running))
            self.plan()

    async def after_run(self) -> None:
        """Prefill what is known of the next run's first prompts, in case it comes soon."""
        changes = self._run.changes
        turns = await self._members.starting()
        await self.link_all([one for one in turns if one.agent not in self._inner], changes)
        with anyio.move_on_after(_NEXT_RUN_SECONDS):
            while changes == self._run.changes and self._links.are_of_this_run():  # noqa: ASYNC110
                await anyio.sleep(END_POLL_SECONDS)
        if changes == self._run.changes:
            self.end_all("unused")


async def possible_calls(
    dry_runs: Sequence[DryRun], futures: Sequence[Sequence[BaseChatMessage]]
) -> list[ModelCall]:
    """Return the different calls that an agent may make.

    Args:
        dry_runs: of that agent; several where its prompt depends on what cannot be known.
        futures: what it may have received by then, each possibility in its order.

    Raises: NotForecastable.
    """
    calls: list[ModelCall] = []
    for dry_run in dry_runs:
        for future in futures:
            call = await dry_run(future)
            if call not in calls:
                calls.append(call)
    return calls
