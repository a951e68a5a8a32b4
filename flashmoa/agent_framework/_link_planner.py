"""Plan the links of an Agent Framework workflow (``WorkflowLinkPlanner``) along its edges."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from agent_framework import (
    AgentExecutorResponse,
    Executor,
    Message,
    Workflow,
)

from flashmoa.agent_framework._client import FlashMoAChatClient
from flashmoa.agent_framework._deliveries import find_deliveries
from flashmoa.agent_framework._dry_run import (
    CallsInOtherTask,
    dry_run,
    get_conversation,
    make_response,
)
from flashmoa.agent_framework._predictability import asks_no_model, why_not_run, why_rewritten
from flashmoa.linking.calls import CallRequest
from flashmoa.linking.forecasts import Forecast, Turn
from flashmoa.linking.placeholders import NotForecastable, Placeholders
from flashmoa.linking.planner import LinkedCall, LinkPlanner
from flashmoa.observe import Listener

# Types of the contents with which a workflow's user replies to an agent's requests.
_REPLIES = ("function_approval_response", "function_result", "computer_tool_result")


@dataclass(slots=True)
class KnownMessages:
    """Holds what is known of the messages in one run of a workflow, by executors' ids.

    Attributes:
        placeholders: placeholders for the texts of all executors.
        conversations: the conversation that each executor which has begun was given.
        predicted: the messages that executors which have not begun will send, from dry runs.
        unpredicted: executors that have begun and whose messages cannot be predicted: others get
            something else than their models' texts, or also their tool calls and the results.
    """

    placeholders: Placeholders
    conversations: dict[str, list[Message]] = field(default_factory=dict[str, list[Message]])
    predicted: dict[str, AgentExecutorResponse] = field(
        default_factory=dict[str, AgentExecutorResponse]
    )
    unpredicted: set[str] = field(default_factory=set[str])


class WorkflowLinkPlanner(LinkPlanner):
    """Plans the links of one workflow.

    Args:
        include: ids of user-defined executors that may be run on copies.
        add_client: is called with each client that a dry run shows an executor to use.
    """

    def __init__(
        self,
        workflow: Workflow,
        include: Collection[str],
        listener: Listener,
        add_client: Callable[[FlashMoAChatClient], None],
    ) -> None:
        super().__init__(listener)
        self._workflow = workflow
        self._deliveries = {
            each.target: each
            for each in find_deliveries(workflow)
            if not asks_no_model(workflow.executors[each.target])
        }
        self._include = include
        self._add_client = add_client
        self._known = KnownMessages(Placeholders(workflow.executors))
        # Reasons why executors are never linked, by their ids; their code is not run again.
        self._never_linked: dict[str, CallsInOtherTask] = {}

    @property
    def is_running(self) -> bool:
        return self._workflow._is_run_active()

    def observe(self, executor: Executor, request: CallRequest) -> LinkedCall:
        """Note that an executor is about to send a request. Return the request's observer."""
        name, rewritten = executor.id, why_rewritten(self._workflow, executor)
        if rewritten is None and name in self._known.conversations:
            previous = self.running.get(name)
            if previous is None or previous.text.is_over:
                # It begins a second time, so this is another run of the workflow.
                self.end_all("unused")
        conversation = get_conversation(executor)
        self._known.conversations.setdefault(name, conversation)
        if rewritten is not None or _answers_requests(conversation):
            self._known.unpredicted.add(name)
        delivery, included = self._deliveries.get(name), name in self._include
        if (
            delivery is not None
            and self._known.conversations.keys() >= {*delivery.sources}
            and (reason := why_not_run(self._workflow, executor, included))
        ):
            # There was no forecast to say so if what it reads could not be predicted either.
            self.decline(name, NotForecastable(reason))
        return self.begin(name, request, rewritten=rewritten, linkable=delivery is not None)

    def end_all(self, reason: str) -> None:
        super().end_all(reason)
        self._known = KnownMessages(Placeholders(self._workflow.executors))

    def call_held_back(self, call: LinkedCall, reason: str) -> None:
        """End the links, as others also get the tool calls and results, which are unknown."""
        super().call_held_back(call, reason)
        self._known.unpredicted.add(call.agent)
        for link in self.waiting_for(call.agent):
            link.end("mispredicted")

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

    async def forecast(self, turn: Turn) -> Forecast | None:
        """Return an executor's next request, from a dry run; ``None`` if its input is unknown."""
        name, known = turn.agent, self._known
        sent, delivery = self._sent() | known.predicted, self._deliveries[name]
        if not all(source in sent for source in delivery.sources):
            return None
        if name in self._never_linked:
            raise self._never_linked[name]
        executor = self._workflow.executors[name]
        message = delivery.make_message([sent[source] for source in delivery.sources])
        included = name in self._include
        try:
            result = await dry_run(self._workflow, executor, message, delivery.sources, included)
        except CallsInOtherTask as reason:
            self._never_linked[name] = reason
            raise
        request = result.request
        self._add_client(request.client)
        if why_rewritten(self._workflow, executor) is None:
            text = known.placeholders.padded(name)
            known.predicted[name] = make_response(executor, result.conversation, text)
        return Forecast(
            turn,
            request.client.engine,
            known.placeholders,
            [request.render],
            namespace=request.namespace,
        )

    def _sent(self) -> dict[str, AgentExecutorResponse]:
        """Return the messages of executors that have begun, with placeholders for their texts."""
        sent: dict[str, AgentExecutorResponse] = {}
        for name, conversation in self._known.conversations.items():
            if name not in self._known.unpredicted:
                text = self._known.placeholders.padded(name)
                sent[name] = make_response(self._workflow.executors[name], conversation, text)
        return sent


def _answers_requests(conversation: Sequence[Message]) -> bool:
    """Return whether an agent resumes with what it has asked for: approvals of tools, or results.

    Others then also get the results.
    """
    contents = conversation[-1].contents if conversation else []
    return any(content.type in _REPLIES for content in contents)
