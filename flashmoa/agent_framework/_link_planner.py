"""The link planner of Agent Framework's workflows: who is given what others write, by the edges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_framework import (
    AgentExecutorResponse,
    Executor,
    FanInEdgeGroup,
    FanOutEdgeGroup,
    Message,
    SingleEdgeGroup,
    Workflow,
)
from agent_framework._workflows._edge import InternalEdgeGroup

from flashmoa.agent_framework._client import FlashMoAChatClient
from flashmoa.agent_framework._dry_run import dry_run, heard_by, response, rewrites
from flashmoa.linking.linked_call import LinkedCall
from flashmoa.linking.observed_call import CallRequest
from flashmoa.linking.placeholders import Placeholders
from flashmoa.linking.planned_links import Forecast, Turn
from flashmoa.linking.planner import LinkPlanner
from flashmoa.observe import Listener


@dataclass(frozen=True, slots=True)
class Delivery:
    """What ``sources`` have sent reaches ``target``.

    ``fan_in``: as one list in this order, regardless of who was first; else there is one source.
    """

    target: str
    sources: tuple[str, ...]
    fan_in: bool = False

    def message(self, sent: Sequence[Any]) -> Any:
        """Return what the target gets of what each source has sent."""
        return list(sent) if self.fan_in else sent[0]


def deliveries(workflow: Workflow) -> list[Delivery]:
    """Return the deliveries that are certain, to targets that receive nothing else."""
    groups = [group for group in workflow.edge_groups if not isinstance(group, InternalEdgeGroup)]
    received = Counter(target for group in groups for target in set(group.target_executor_ids))
    found: list[Delivery] = []
    for group in groups:
        if isinstance(group, FanInEdgeGroup):
            sources = tuple(edge.source_id for edge in group.edges)
            found.append(Delivery(group.edges[0].target_id, sources, fan_in=True))
        elif isinstance(group, SingleEdgeGroup) or (
            isinstance(group, FanOutEdgeGroup) and group.selection_func is None
        ):
            edges = [edge for edge in group.edges if not edge.has_condition]
            found += [Delivery(edge.target_id, (edge.source_id,)) for edge in edges]
    return [one for one in found if received[one.target] == 1]


@dataclass(slots=True)
class Conversation:
    """What is known of one run of a workflow, by executors' ids.

    Attributes:
        placeholders: for the texts of all executors.
        heard: what each executor that has begun was given.
        sending: what executors that have not begun will send on, as dry runs tell.
        called_tools: executors whose answers cannot be told: others also get their calls of
            tools, and the results.
    """

    placeholders: Placeholders
    heard: dict[str, list[Message]] = field(default_factory=dict[str, list[Message]])
    sending: dict[str, AgentExecutorResponse] = field(
        default_factory=dict[str, AgentExecutorResponse]
    )
    called_tools: set[str] = field(default_factory=set[str])


class WorkflowLinkPlanner(LinkPlanner):
    """The links of one workflow.

    Args:
        include: executors of the user's own classes that may be run on copies.
        watch: is called with each client that an executor turns out to ask.
    """

    def __init__(
        self,
        workflow: Workflow,
        include: Collection[str],
        listener: Listener,
        watch: Callable[[FlashMoAChatClient], None],
    ) -> None:
        super().__init__(listener)
        self._workflow = workflow
        self._deliveries = {one.target: one for one in deliveries(workflow)}
        self._include = include
        self._watch = watch
        self._conversation = Conversation(Placeholders(workflow.executors))

    @property
    def is_running(self) -> bool:
        return self._workflow._is_run_active()

    def observe(self, executor: Executor, request: CallRequest) -> LinkedCall:
        """Note a request of an executor that goes out."""
        name, rewritten = executor.id, rewrites(executor)
        if rewritten is None and name in self._conversation.heard:
            before = self._run.running.get(name)
            if before is None or before.text.is_over:
                self.end_all("unused")  # It begins again: another run.
        self._conversation.heard.setdefault(name, heard_by(executor))
        is_target = name in self._deliveries
        return self.begin(name, request, rewrite_reason=rewritten, linkable=is_target)

    def end_all(self, reason: str) -> None:
        super().end_all(reason)
        self._conversation = Conversation(Placeholders(self._workflow.executors))

    def call_held_back(self, call: LinkedCall, reason: str) -> None:
        """End the links: others also get its calls of tools and their results, which cannot be
        told."""
        super().call_held_back(call, reason)
        self._conversation.called_tools.add(call.agent)
        for link in self.waiting_for(call.agent):
            link.end("mispredicted")

    async def upcoming(self, caller: str) -> Sequence[Turn]:
        """Follow the edges from the executors that have begun."""
        reached = set(self._sent())
        left = [one for one in self._deliveries.values() if one.target not in reached]
        turns: list[Turn] = []
        while ready := [one for one in left if reached.issuperset(one.sources)]:
            left = [one for one in left if one not in ready]
            turns += [Turn(one.target) for one in ready]
            reached |= {one.target for one in ready}
        return [turn for turn in turns if turn.agent not in self._conversation.heard]

    async def forecast(self, turn: Turn) -> Forecast | None:
        """Return what an executor will send, told by a dry run; ``None`` where what it will be
        given is not known."""
        name, conversation = turn.agent, self._conversation
        sent, delivery = self._sent() | conversation.sending, self._deliveries[name]
        if not all(source in sent for source in delivery.sources):
            return None
        executor = self._workflow.executors[name]
        message = delivery.message([sent[source] for source in delivery.sources])
        included = name in self._include
        run = await dry_run(self._workflow, executor, message, delivery.sources, included)
        self._watch(run.request.client)
        placeholders = conversation.placeholders
        if rewrites(executor) is None:
            conversation.sending[name] = response(executor, run.heard, placeholders.padded(name))
        return Forecast(
            turn,
            run.request.client.engine,
            placeholders,
            [run.request.render],
            namespace=run.request.namespace,
        )

    def _sent(self) -> dict[str, AgentExecutorResponse]:
        """Return what those who have begun will send on, with placeholders for their texts."""
        sent: dict[str, AgentExecutorResponse] = {}
        conversation = self._conversation
        for name, heard in conversation.heard.items():
            executor = self._workflow.executors[name]
            if rewrites(executor) is None and name not in conversation.called_tools:
                padded = conversation.placeholders.padded(name)
                sent[name] = response(executor, heard, padded)
        return sent
