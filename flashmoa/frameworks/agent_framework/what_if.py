"""What-if supersteps: find the next request of a chat, by running the framework's code on copies.

A chat is a workflow that ``GroupChatBuilder``, ``MagenticBuilder`` or ``HandoffBuilder`` has made.
In the first two, an orchestrator receives an agent's answer, decides who speaks next, and sends
messages to the agents. In the third, the agents hand off to each other themselves. A forecast is
made in three steps:

1. :class:`WhatIf` copies the executors that take part, and the messages that the run has sent and
   not delivered yet. Copies of agents raise their first request instead of sending it. In place of
   the decision, copies choose the agent whose request is sought, and they have no termination
   condition. So a forecast runs no user-defined code.
2. The copy of the writer ends with an answer, with a placeholder as its text
   (:meth:`WhatIf.after_answer`); or the copy of the orchestrator goes on as if its manager had
   decided (:meth:`WhatIf.after_decision`).
3. The messages that follow are delivered to the copies, superstep by superstep, until the agent
   asks its model.

Messages to executors that do not take part are dropped. Neither the workflow nor telemetry nor
middleware sees a forecast.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from agent_framework import (
    AgentExecutor,
    AgentResponse,
    Executor,
    Message,
    Workflow,
    WorkflowContext,
)
from agent_framework._workflows._edge import InternalEdgeGroup
from agent_framework._workflows._runner_context import WorkflowMessage
from agent_framework_orchestrations import (
    AgentBasedGroupChatOrchestrator,
    AgentOrchestrationOutput,
    BaseGroupChatOrchestrator,
    GroupChatOrchestrator,
    HandoffAgentExecutor,
    MagenticOrchestrator,
    MagenticProgressLedger,
    MagenticProgressLedgerItem,
)

from flashmoa.frameworks import ChatRequest
from flashmoa.frameworks.agent_framework.dry_run import (
    captured_request,
    copy_agent,
    copy_agent_executor,
    copy_containers,
    copy_runner_context,
    copy_session,
    copy_state,
    find_handler,
)

# The sender of messages that executors have received before the forecast.
_BEFORE = "(before)"


class WhatIf:
    """A possible future of a running chat, up to the next request of the executor ``asked``.

    Each forecast needs a new one. It copies the workflow's state when it is made.

    Args:
        asked: the id of an agent's executor, which is chosen to speak; or of the orchestrator,
            whose manager is asked who speaks next.
        writer: the id of the executor whose agent is writing; ``None`` if the manager is asked now.
        orchestrator: the chat's orchestrator, which must be the framework's own; ``None`` if agents
            hand off to each other.
        instruction: the manager's instruction to the agent (Magentic only).
    """

    def __init__(
        self,
        workflow: Workflow,
        asked: str,
        writer: str | None,
        orchestrator: BaseGroupChatOrchestrator | None,
        instruction: str = "",
    ) -> None:
        self._workflow = workflow
        self._asked = asked
        self._orchestrator: Any = orchestrator
        self._instruction = instruction
        self._state = copy_state(workflow)
        self._sent = copy_runner_context(workflow)
        pending: dict[str, list[WorkflowMessage]] = cast("Any", workflow._runner.context)._messages
        self._sent._messages = {source: list(sent) for source, sent in pending.items()}
        self._targets = find_targets(workflow)
        # The executors that get messages.
        receivers = {asked} if orchestrator is None else {asked, orchestrator.id}
        self._copies = {name: self._copy(name) for name in receivers}
        self._writer: Any = None if writer is None else self._copy(writer)

    async def after_answer(self, texts: Sequence[str]) -> ChatRequest:
        """Return the request that follows if the writer's answer has these texts.

        Args:
            texts: the text of each message of the answer.

        Raises: NotForecastable if no request follows, or the forecast fails.
        """
        shadow = self._writer
        author = shadow._agent._get_agent_name()
        answer = [Message("assistant", [text], author_name=author) for text in texts]

        async def run(*_: object, **__: object) -> AgentResponse:
            return AgentResponse(messages=answer)

        shadow._agent.run = run
        return await self._run(shadow._run_agent_and_emit(self._context(shadow, _BEFORE)))

    async def after_decision(self, task: Sequence[Message]) -> ChatRequest:
        """Return the request that follows if the manager, which is asked now, chooses its agent.

        Args:
            task: the messages that the manager decides on. (Magentic's manager has sent them on.)

        Raises: as :meth:`after_answer`.
        """
        shadow = self._copies[self._orchestrator.id]
        context = self._context(shadow, _BEFORE)
        if isinstance(shadow, MagenticOrchestrator):
            return await self._run(shadow._run_inner_loop_helper(context))
        return await self._run(shadow._handle_messages(list(task), context))

    async def _run(self, beginning: Any) -> ChatRequest:
        async def supersteps() -> None:
            await beginning
            while await self._sent.has_messages():
                await self._superstep()

        return await captured_request(supersteps())

    async def _superstep(self) -> None:
        """Deliver the messages that were sent so far to the copies that take part."""
        for source, messages in (await self._sent.drain_messages()).items():
            for message in messages:
                for target in self._targets[source]:
                    if message.target_id in (None, target) and target in self._copies:
                        await self._deliver(message, target)

    async def _deliver(self, message: WorkflowMessage, target: str) -> None:
        shadow = self._copies[target]
        if shadow.can_handle(message):
            context = self._context(shadow, message.source_id)
            await find_handler(shadow, message)(message.data, context)

    def _context(self, shadow: Executor, source: str) -> _Context:
        return _Context(shadow, [source], self._state, self._sent)

    def _copy(self, name: str) -> Any:
        executor = self._workflow.executors[name]
        if not isinstance(executor, AgentExecutor):
            return self._copy_orchestrator()
        shadow: Any = copy_agent_executor(executor)
        if isinstance(shadow, HandoffAgentExecutor):
            shadow._is_handoff_requested = partial(_hand_off, self._asked)
            shadow._termination_condition = None
        return shadow

    def _copy_orchestrator(self) -> Any:
        shadow = copy_containers(self._orchestrator)
        shadow._termination_condition = None
        if isinstance(shadow, GroupChatOrchestrator):
            shadow._selection_func = partial(_choose, self._asked)
        elif isinstance(shadow, AgentBasedGroupChatOrchestrator):
            if self._asked == shadow.id:
                shadow._agent = copy_agent(shadow._agent)
                shadow._session = copy_session(shadow._session)
            else:
                shadow._invoke_agent = partial(_decide, self._asked)
        elif isinstance(shadow, MagenticOrchestrator):
            shadow._magentic_context = _copy_magentic(shadow._magentic_context)
            shadow._max_rounds = None  # The present round has been counted.
            shadow._manager = self._copy_magentic_manager()
        return shadow

    def _copy_magentic_manager(self) -> Any:
        if self._asked == self._orchestrator.id:
            manager: Any = copy.copy(self._orchestrator._manager)
            manager._agent = copy_agent(manager._agent)
        else:
            ledger = partial(_keep_ledger, self._asked, self._instruction)
            manager = SimpleNamespace(create_progress_ledger=ledger, max_stall_count=sys.maxsize)
        manager.max_reset_count = None
        return manager


class _Context(WorkflowContext[Any, Any]):
    """A handler's context that keeps the messages, and drops events and outputs."""

    async def send_message(self, message: Any, target_id: str | None = None) -> None:
        sent = WorkflowMessage(data=message, source_id=self._executor_id, target_id=target_id)
        await self._runner_context.send_message(sent)

    async def yield_output(self, output: Any) -> None: ...

    async def add_event(self, event: Any) -> None: ...


def find_targets(workflow: Workflow) -> defaultdict[str, list[str]]:
    """Return the executors that each executor can send messages to."""
    targets: defaultdict[str, list[str]] = defaultdict(list)
    for group in workflow.edge_groups:
        if not isinstance(group, InternalEdgeGroup):
            for edge in group.edges:
                targets[edge.source_id].append(edge.target_id)
    return targets


def _hand_off(target: str, response: object) -> tuple[str, Message]:
    """Stand in for the search for a handoff in an answer."""
    return target, Message("tool", [])


def _choose(speaker: str, _: object) -> str:
    """Stand in for the selection function of a group chat."""
    return speaker


def _copy_magentic(context: Any) -> Any:
    """Copy the context of a Magentic chat.

    The orchestrator gives its manager deep copies of the context, which are dear. The manager only
    reads them, so here it gets the context itself.
    """
    shadow = copy_containers(context)

    def clone(*, deep: bool) -> Any:
        return shadow

    shadow.clone = clone
    return shadow


async def _decide(speaker: str, ctx: object) -> AgentOrchestrationOutput:
    """Stand in for the call of a group chat's manager."""
    return AgentOrchestrationOutput(terminate=False, reason="", next_speaker=speaker)


async def _keep_ledger(speaker: str, instruction: str, _: object) -> MagenticProgressLedger:
    """Stand in for the call of a Magentic chat's manager."""
    item = MagenticProgressLedgerItem
    return MagenticProgressLedger(
        is_request_satisfied=item("", False),
        is_in_loop=item("", False),
        is_progress_being_made=item("", True),
        next_speaker=item("", speaker),
        instruction_or_question=item("", instruction),
    )
