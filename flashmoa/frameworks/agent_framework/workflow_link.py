"""Link a workflow's agents (``link``), and plan the links along its edges."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack, cast

from agent_framework import (
    AgentExecutor,
    AgentExecutorResponse,
    Executor,
    FanInEdgeGroup,
    FanOutEdgeGroup,
    Message,
    SingleEdgeGroup,
    Workflow,
)
from agent_framework._workflows._edge import EdgeGroup, InternalEdgeGroup

from flashmoa.frameworks import (
    CallRequest,
    ExpectedRequest,
    LinkedCall,
    LinkedTeam,
    LinkOptions,
    LinkPlanner,
    LinkSettings,
    NotForecastable,
    Placeholders,
    Report,
    RequestAfterTools,
    Turn,
    listen_for,
)
from flashmoa.frameworks.agent_framework.chats import (
    ChatLinkPlanner,
    find_orchestrator,
    is_chat,
)
from flashmoa.frameworks.agent_framework.client import (
    AgentFrameworkRequest,
    FlashMoAChatClient,
    ToolCalls,
)
from flashmoa.frameworks.agent_framework.dry_run import (
    answers_requests,
    asks_no_model,
    client_of,
    dry_run,
    get_conversation,
    holds_workflow,
    make_response,
    request_after_tools,
    why_not_run,
    why_rewritten,
)
from flashmoa.observe import Listener

logger = logging.getLogger(__name__)


def link(
    workflow: Workflow, *, kv_share: float = 0.5, **options: Unpack[LinkOptions]
) -> WorkflowLink:
    """Link a workflow's agents: each agent's tokens stream into the prompts of later agents.

    Call it once after building the workflow; runs, prompts and answers stay the same. Linking a
    workflow again replaces the first link.

    Args:
        workflow: a workflow made by ``SequentialBuilder``, ``GroupChatBuilder``,
            ``MagenticBuilder`` or ``HandoffBuilder``, or by ``WorkflowBuilder`` without conditions
            on edges. Other workflows are not linked, which is logged. The agents' clients must be
            ``FlashMoAChatClient``. These agents run unlinked: agents with other clients, agents of
            user-defined classes, agents with middleware (also of the client or the run), compaction
            strategies, context providers or MCP servers, and agents whose client has hooks
            (``message_preparer``, ``response_parser``). Linking only runs the framework's own code.
        kv_share: the share of an engine's KV pool for agents that may speak next but need not.
            Only a workflow that chooses its speakers has such agents.
        options: see :class:`flashmoa.LinkOptions`, also for exceptions.

    Raises:
        TypeError: if ``workflow`` is not a workflow.
        ValueError: if no agent of the workflow uses a FlashMoA client; if ``on_failure`` names an
            unknown one; if ``kv_share`` is not between 0 and 1.
    """
    if not isinstance(workflow, Workflow):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"only a Workflow can be linked, not a {type(workflow).__name__}; if it is a builder, "
            "build it first"
        )
    settings, clients = LinkSettings(**options), _find_clients(workflow)
    settings.check_agents(workflow.executors)
    linked = WorkflowLink(workflow, clients, settings, listen_for(workflow, settings), kv_share)
    if reason := linked._planner.why_nothing_linked():
        logger.warning("link(workflow) links nothing: %s. Its agents run as usual.", reason)
    return linked


def _find_clients(workflow: Workflow) -> list[FlashMoAChatClient]:
    """Return the FlashMoA clients of a workflow's agents.

    Raises: ValueError if it has none.
    """
    executors = workflow.executors.values()
    clients = [client for each in executors if (client := client_of(each)) is not None]
    if clients:
        return clients
    nested = sorted(each.id for each in executors if holds_workflow(each))
    hint = (
        f"{nested} run workflows of their own, whose agents are not seen from here; link an inner "
        "workflow itself. (with_request_info() makes a workflow of each agent, which cannot be "
        "linked to the others.)"
        if nested
        else "Give the agents one as their client."
    )
    raise ValueError(
        f"no agent of this workflow uses FlashMoAChatClient; there is nothing to link. {hint}"
    )


class WorkflowLink(LinkedTeam["WorkflowLinkPlanner | ChatLinkPlanner"]):
    """Links a workflow, until it or the workflow's clients are closed.

    Use :func:`link` to make one.
    """

    def __init__(
        self,
        workflow: Workflow,
        clients: Collection[FlashMoAChatClient],
        settings: LinkSettings,
        listener: Listener,
        kv_share: float,
    ) -> None:
        self._workflow = workflow
        report = Report(listener)
        planner = (
            ChatLinkPlanner(workflow, find_orchestrator(workflow), settings, report, kv_share)
            if is_chat(workflow)
            else WorkflowLinkPlanner(workflow, settings, report, kv_share)
        )
        observed = [each.linked_teams for each in clients]
        super().__init__(workflow, observed, planner, report, listener)

    def _find_name(self, caller: Executor) -> str | None:
        return caller.id if self._workflow.executors.get(caller.id) is caller else None

    def _begin(self, name: str, request: CallRequest) -> LinkedCall | None:
        return self._planner.observe(name, request)


@dataclass(slots=True)
class KnownMessages:
    """The known messages in a run of a workflow, by the ids of executors.

    Attributes:
        placeholders: placeholders for the texts of all executors.
        conversations: the conversations that executors got when they began.
        predicted: the messages of executors that have not begun, from dry runs.
        lengths: the numbers of messages of executors' first requests.
        results: the calls of tools, and their results, before executors' latest requests.
        unpredicted: executors that have begun, but whose messages cannot be predicted: others get
            other texts than their models', or also results of tools that are not there yet.
    """

    placeholders: Placeholders
    conversations: dict[str, list[Message]] = field(default_factory=dict[str, list[Message]])
    predicted: dict[str, AgentExecutorResponse] = field(
        default_factory=dict[str, AgentExecutorResponse]
    )
    lengths: dict[str, int] = field(default_factory=dict[str, int])
    results: dict[str, Sequence[Message]] = field(default_factory=dict[str, Sequence[Message]])
    unpredicted: set[str] = field(default_factory=set[str])


class WorkflowLinkPlanner(LinkPlanner):
    """Plans the links of a workflow.

    Attributes:
        linkable: the agents that certainly read only texts of other agents.
    """

    def __init__(
        self, workflow: Workflow, settings: LinkSettings, listener: Listener, kv_share: float
    ) -> None:
        super().__init__(listener, settings, kv_share=kv_share)
        self._workflow = workflow
        self._deliveries = {
            each.target: each
            for each in find_deliveries(workflow)
            if not asks_no_model(workflow.executors[each.target])
        }
        self._agents = {name for name, each in workflow.executors.items() if client_of(each)}
        self.linkable = {
            each.target
            for each in self._deliveries.values()
            if self._agents.issuperset((each.target, *each.sources))
        }
        self._known = KnownMessages(Placeholders(workflow.executors))

    @property
    def is_running(self) -> bool:
        return self._workflow._is_run_active()

    def observe(self, name: str, request: CallRequest) -> LinkedCall:
        """Note that an executor is about to send a request. Return the request's observer."""
        executor = self._workflow.executors[name]
        rewritten = why_rewritten(self._workflow, executor)
        if rewritten is None and name in self._known.conversations:
            previous = self.running.get(name)
            if previous is None or previous.text.is_over:
                # The executor begins again: this is another run of the workflow.
                self.end_all("unused")
        conversation = get_conversation(executor)
        self._known.conversations.setdefault(name, conversation)
        messages = cast("AgentFrameworkRequest", request).messages
        length = self._known.lengths.setdefault(name, len(messages))
        if len(messages) > length:
            # Its tools have run: others get their calls and results, and then its text.
            self._known.results[name] = messages[length:]
            self._known.unpredicted.discard(name)
        if rewritten is not None or answers_requests(conversation):
            self._known.unpredicted.add(name)
        delivery = self._deliveries.get(name)
        if (
            delivery is not None
            and self._known.conversations.keys() >= {*delivery.sources}
            and (reason := why_not_run(self._workflow, executor))
        ):
            # If the messages that it reads were unknown, nothing has told the reason.
            self.links.decline(name, NotForecastable(reason))
        return self.begin(name, request, rewritten=rewritten, linkable=name in self.linkable)

    def why_nothing_linked(self) -> str | None:
        """Return why no agent of the workflow can be linked; ``None`` if one can."""
        if self.linkable:
            return None
        return "no agent of the workflow is certain to read what another one writes"

    def why_unplanned(self, agent: str) -> str:
        delivery = self._deliveries.get(agent)
        if not self._has_begun or agent in self.linkable:
            return super().why_unplanned(agent)
        if delivery is None:
            return "it is not certain what it reads, by the edges that lead to it"
        executors = self._workflow.executors
        others = [name for name in delivery.sources if name not in self._agents]
        if not any(isinstance(executors[name], AgentExecutor) for name in delivery.sources):
            return "it reads no agent's text"
        return f"it reads what {others[0]} writes, which has no FlashMoAChatClient"

    def end_all(self, reason: str) -> None:
        super().end_all(reason)
        self._known = KnownMessages(Placeholders(self._workflow.executors))

    def call_held_back(self, call: LinkedCall, reason: str) -> None:
        """End the links, as others also get results of tools, which are unknown."""
        super().call_held_back(call, reason)
        self._known.unpredicted.add(call.agent)
        for link in self.waiting_for(call.agent):
            link.end("mispredicted")

    def request_after_tools(self, agent: str, answer: object) -> RequestAfterTools | None:
        return request_after_tools(self._workflow, agent, cast("ToolCalls", answer))

    async def upcoming(self, caller: str) -> Sequence[Turn]:
        """Follow the edges from the executors that have begun."""
        reached = set(self._sent())
        waiting = [each for each in self._deliveries.values() if each.target not in reached]
        turns: list[Turn] = []
        while ready := [each for each in waiting if reached.issuperset(each.sources)]:
            waiting = [each for each in waiting if each not in ready]
            turns += [Turn(delivery.target) for delivery in ready]
            reached |= {delivery.target for delivery in ready}
        return [turn for turn in turns if turn.agent not in self._known.conversations]

    async def expect(self, turn: Turn) -> ExpectedRequest | None:
        """Return an executor's next request, from a dry run; ``None`` if its input is unknown."""
        name, known = turn.agent, self._known
        sent, delivery = self._sent() | known.predicted, self._deliveries[name]
        if not all(source in sent for source in delivery.sources):
            return None
        executor = self._workflow.executors[name]
        message = delivery.make_message([sent[source] for source in delivery.sources])
        request, conversation = await dry_run(self._workflow, executor, message, delivery.sources)
        if why_rewritten(self._workflow, executor) is None:
            text = known.placeholders.padded(name)
            known.predicted[name] = make_response(executor, conversation, text)
        return ExpectedRequest(turn, [request], known.placeholders)

    def _sent(self) -> dict[str, AgentExecutorResponse]:
        """Return the messages of executors that have begun, with placeholders as texts."""
        sent: dict[str, AgentExecutorResponse] = {}
        for name, conversation in self._known.conversations.items():
            if name not in self._known.unpredicted:
                text = self._known.placeholders.padded(name)
                results = self._known.results.get(name, ())
                executor = self._workflow.executors[name]
                sent[name] = make_response(executor, conversation, text, results)
        return sent


@dataclass(frozen=True, slots=True)
class Delivery:
    """The executor ``target`` gets the messages of the executors ``sources``.

    With ``fan_in``, it gets them as a list in this order, in whatever order they finish; otherwise
    there is a single source.
    """

    target: str
    sources: tuple[str, ...]
    fan_in: bool = False

    def make_message(self, sent: Sequence[Any]) -> Any:
        """Return the target's message, given the message of each source."""
        return list(sent) if self.fan_in else sent[0]


def find_deliveries(workflow: Workflow) -> list[Delivery]:
    """Return the certain deliveries, to targets that receive no other messages.

    A delivery is not certain if its source may be reached again before its target has begun.
    """
    groups = [group for group in workflow.edge_groups if not isinstance(group, InternalEdgeGroup)]
    arrivals = _find_arrivals(groups)
    serial = _find_serial(workflow.start_executor_id, arrivals)
    deliveries: list[Delivery] = []
    for group in groups:
        if isinstance(group, FanInEdgeGroup):
            sources = tuple(edge.source_id for edge in group.edges)
            deliveries.append(Delivery(group.edges[0].target_id, sources, fan_in=True))
        elif isinstance(group, SingleEdgeGroup) or (
            isinstance(group, FanOutEdgeGroup) and group.selection_func is None
        ):
            edges = [edge for edge in group.edges if not edge.has_condition]
            deliveries += [Delivery(edge.target_id, (edge.source_id,)) for edge in edges]
    return [
        delivery
        for delivery in deliveries
        if len(arrivals[delivery.target]) == 1 and serial.issuperset(delivery.sources)
    ]


def _find_arrivals(groups: Sequence[EdgeGroup]) -> dict[str, list[set[str]]]:
    """Return the sources of the edge groups that lead to each executor."""
    arrivals: dict[str, list[set[str]]] = defaultdict(list)
    for group in groups:
        for target in set(group.target_executor_ids):
            arrivals[target].append(set(group.source_executor_ids))
    return arrivals


def _find_serial(start: str, arrivals: dict[str, list[set[str]]]) -> set[str]:
    """Return the executors whose receivers begin before the executors are reached again.

    Such an executor has at most one way from the start, and at most one way that returns from it:
    its message goes around before it is reached again. With two ways from the start, or two that
    return, it may be reached twice at the same time, and so may its receivers.
    """

    def is_reached_one_by_one(name: str) -> bool:
        ways, downstream = arrivals.get(name, []), _find_downstream(name, arrivals)
        returning = sum(1 for way in ways if way & downstream)
        entering = len(ways) - returning + (name == start)
        return returning <= 1 and entering <= 1 and not any(name in way for way in ways)

    serial = {name for name in {start, *arrivals} if is_reached_one_by_one(name)}
    while after := {
        name for name in serial if any(not way <= serial for way in arrivals.get(name, []))
    }:
        serial -= after
    return serial


def _find_downstream(name: str, arrivals: dict[str, list[set[str]]]) -> set[str]:
    """Return the executors that an executor's message may reach, in any number of steps."""
    found: set[str] = set()
    while more := {
        target
        for target, ways in arrivals.items()
        if target not in found and any(way & {name, *found} for way in ways)
    }:
        found |= more
    return found
