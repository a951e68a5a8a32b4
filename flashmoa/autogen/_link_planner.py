"""Plan the links of an AutoGen team (``TeamLinkPlanner``)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import anyio
from autogen_agentchat.messages import BaseChatMessage

from flashmoa.autogen._callers import observe_tools
from flashmoa.autogen._client import FlashMoAChatCompletionClient, render
from flashmoa.autogen._dry_run import DryRun, ModelCall
from flashmoa.autogen._model_call import ToolAnswer
from flashmoa.autogen._team_members import TeamMembers
from flashmoa.autogen._turn_order import MANAGER, SUMMARY
from flashmoa.linking.calls import CallResult
from flashmoa.linking.failure_policy import FailurePolicy
from flashmoa.linking.forecasts import Forecast, RequestAfterTools, Turn
from flashmoa.linking.link import Ahead, Link
from flashmoa.linking.placeholders import UNCERTAIN, Placeholders
from flashmoa.linking.planner import DELIVERY_SECONDS, END_POLL_SECONDS, LinkedCall, LinkPlanner
from flashmoa.linking.prompt import Prompt
from flashmoa.observe import Listener

_LONGEST_DELIVERY_SECONDS = 1.0
# How long links for a team's next run are kept after its run has ended.
_NEXT_RUN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Says how a team is linked; see :func:`flashmoa.autogen.link`."""

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
    """Plans the links of one team.

    Args:
        inner: the planners of the teams within this one, by the name of the member (the inner team
            itself, or the ``SocietyOfMindAgent`` that has it).
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
        # Teams within this one have their own planners.
        return [turn for turn in turns if turn.agent not in self._inner]

    async def forecast(self, turn: Turn) -> Forecast:
        """Return what the agent of a turn will send, as dry runs of its code show."""
        members, agent = self._members, turn.agent
        client = members.client(agent)
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

        calls = await predict_calls(members.dry_runs(agent), futures)
        return Forecast(
            turn,
            client.engine,
            placeholders,
            [partial(render, client, call.messages, call.tools, **call.options) for call in calls],
            on_failure=self._settings.policy(agent, client),
            holds=holds,
        )

    def possible(self) -> set[str]:
        """Return the agents that the manager waits for, the inner teams, and ``SUMMARY``."""
        return self._members.active_speakers() | {SUMMARY} | self._inner.keys()

    def take_link(self, agent: str, url: str) -> Link | None:
        """Return the link to the prompt of a call that has arrived, and hold it no longer.

        The link to a ``SocietyOfMindAgent``'s call is held by its inner team's planner.
        """
        inner = self._inner.get(agent)
        return super().take_link(agent, url) if inner is None else inner.take_link(SUMMARY, url)

    def call_answered(self, call: LinkedCall, result: CallResult) -> None:
        super().call_answered(call, result)
        if call.text.is_complete:
            self._plan_again(call)

    def _plan_again(self, call: LinkedCall) -> None:
        """Plan again once the message is delivered, if a prompt depends on the order of messages.

        Such a prompt is known only up to the first text whose place is uncertain; with one more
        message delivered, more of it is certain.
        """
        readers = [link.agent for link in self.waiting_for(UNCERTAIN)]
        counts = {name: len(self._members.received(name)) for name in readers if name != MANAGER}
        if counts:
            self.host.start(lambda: self._plan_when_delivered(call, counts))

    def request_after_tools(self, agent: str, answer: object) -> RequestAfterTools | None:
        """Return the agent's next request, if it will make one; learn the results of its tools."""
        if not isinstance(answer, ToolAnswer):
            return None
        request = self._members.own_request(agent, answer)
        if request is None:
            return None
        client, tools = request.client, request.tools

        async def render_with(results: Mapping[str, str]) -> str:
            following = await request.dry_run([results[tool] for tool in tools])
            return await render(client, following.messages, following.tools, **following.options)

        policy = self._settings.policy(agent, client)
        held = RequestAfterTools(agent, client.engine, tools, render_with, on_failure=policy)

        def learn(place: int, result: str | None) -> None:
            if result is None:
                self.give_up(held)
            else:
                self.add_result(held, tools[place], result)

        observe_tools()
        answer.called.on_result = learn
        return held

    async def _plan_when_delivered(self, call: LinkedCall, counts: Mapping[str, int]) -> None:
        """Plan again once every reader has received more messages than it had.

        Args:
            counts: how many messages each reader had received, by its name.
        """
        received = self._members.received
        with anyio.move_on_after(_LONGEST_DELIVERY_SECONDS):
            while not all(len(received(name)) > count for name, count in counts.items()):  # noqa: ASYNC110
                await anyio.sleep(DELIVERY_SECONDS)
        # The call's text is among the messages now, so that no link waits for it.
        self.drop_call(call)
        if self.running:
            self.caller = next(iter(self.running))
            self.plan()

    def run_ended(self) -> None:
        super().run_ended()
        self.host.start(self._link_next_run)

    async def _link_next_run(self) -> None:
        """Prefill the known parts of the next run's first prompts, in case it comes soon."""
        changes = self.changes
        turns = await self._members.first_turns()
        counts = [self._members.count_received_since(turn.agent) for turn in turns]
        await self.link_all([turn for turn in turns if turn.agent not in self._inner], changes)
        with anyio.move_on_after(_NEXT_RUN_SECONDS):
            # A team that was reset begins anew.
            while changes == self.changes and all(count() is not None for count in counts):  # noqa: ASYNC110
                await anyio.sleep(END_POLL_SECONDS)
        if changes == self.changes:
            self.end_all("unused")


def has_received(received: int, expected: int, prompt: Prompt) -> bool:
    """Return whether an agent that calls its model has received the messages of its forecast.

    It has not if the team was stopped before that, and was run again or reset.
    """
    if prompt.is_complete:
        return received == expected
    return received >= len({slot.name for slot in prompt.slots if not slot.is_open})


def awaits(turn: Turn, missing: int, prompt: Prompt) -> bool:
    """Return whether a prompt waits for the writers of a turn, and for no more messages.

    Args:
        missing: how many of the messages of its forecast the agent has not received.
    """
    awaited = {slot.name for slot in prompt.slots if slot.is_open}
    return UNCERTAIN not in awaited and awaited == set(turn.writers) and len(awaited) <= missing


async def predict_calls(
    dry_runs: Sequence[DryRun], futures: Sequence[Sequence[BaseChatMessage]]
) -> list[ModelCall]:
    """Return the different calls that an agent may make.

    Args:
        dry_runs: dry runs of its next turn; several if its prompt depends on unknown things.
        futures: the messages it may receive until then, one list for each possibility.

    Raises: NotForecastable, see :data:`DryRun`.
    """
    calls: list[ModelCall] = []
    for dry_run in dry_runs:
        for future in futures:
            call = await dry_run(future)
            if call not in calls:
                calls.append(call)
    return calls
