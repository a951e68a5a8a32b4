"""Link a workflow's agents (``link``)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from pathlib import Path
from types import FrameType

from agent_framework import AgentExecutor, BaseAgent, Executor, Workflow

from flashmoa.agent_framework._client import FlashMoAChatClient
from flashmoa.agent_framework._link_planner import WorkflowLinkPlanner
from flashmoa.agent_framework._predictability import client_of
from flashmoa.linking.linked_call import LinkedCall
from flashmoa.linking.observed_call import CallRequest, LinkedTeam
from flashmoa.observe import Listener, ignore
from flashmoa.observe.trace import add_trace, end_trace

logger = logging.getLogger(__name__)

# The attribute of a workflow that holds its link, so that both live equally long.
_LINK_ATTRIBUTE = "_flashmoa_link"


def link(
    workflow: Workflow,
    *,
    include: Collection[str] = (),
    trace: Path | str | None = None,
    trace_prompts: bool = False,
    listener: Listener = ignore,
) -> WorkflowLink:
    """Link a workflow's agents: each one's tokens stream into the prompts of those after it.

    Call it once after building the workflow; runs, prompts and answers stay the same. Linking a
    workflow again replaces the first link.

    Args:
        workflow: a workflow made by ``SequentialBuilder``, ``ConcurrentBuilder``, or
            ``WorkflowBuilder`` without conditions on edges. Its agents' clients must be
            ``FlashMoAChatClient``. Agents with other clients, agents of user-defined classes, and
            agents with middleware, context providers or MCP servers run unlinked.
        include: ids of executors to link although they run your own code: a
            ``ConcurrentBuilder``'s aggregator (a callback's id is its name), or an agent that would
            run unlinked otherwise. To predict its next request, such an executor is run on a copy,
            up to the call of its model. Copied are its agent and the data that both hold: messages,
            containers, dataclasses and pydantic models, at any depth, and all of its session's
            state; the code must not change anything else. It must await the call itself: an
            executor that calls its model in another task (``asyncio.gather``, a worker) is not
            linked, and if that task was running before, or goes on when the copy's run has ended,
            its requests are sent. It must not run a workflow; executors that hold one are never run
            on copies.
        trace: a file to write all events to, for ``flashmoa trace``. An existing trace is replaced,
            unless another link is writing it: then both write to it.
        trace_prompts: whether to write the prompts of calls, too. ``flashmoa trace`` and
            ``flashmoa doctor --trace`` then say why prefixes broke.
        listener: receives all events.

    Raises:
        TypeError: if ``workflow`` is not a workflow.
        OSError: if the trace cannot be written.
        ValueError: if no agent of the workflow uses a FlashMoA client; if ``include`` names an
            unknown executor; if ``trace`` names an HTML page, or an existing file that is not a
            trace; if ``trace_prompts`` is given without ``trace``.
    """
    if not isinstance(workflow, Workflow):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"only a Workflow can be linked, not a {type(workflow).__name__}; if it is a builder, "
            "build it first"
        )
    if unknown := [name for name in include if name not in workflow.executors]:
        raise ValueError(f"include names {unknown}; the workflow has {sorted(workflow.executors)}")
    previous: WorkflowLink | None = getattr(workflow, _LINK_ATTRIBUTE, None)
    listener = add_trace(
        listener,
        trace,
        prompts=trace_prompts,
        successor_of=previous.listener if previous is not None else None,
    )
    return WorkflowLink(workflow, frozenset(include), listener)


class WorkflowLink(LinkedTeam):
    """Links one workflow, until it or the workflow's clients are closed.

    Use :func:`link` to make one.

    Attributes:
        listener: receives its events.
    """

    def __init__(self, workflow: Workflow, include: Collection[str], listener: Listener) -> None:
        clients = [client_of(executor) for executor in workflow.executors.values()]
        if not any(clients):
            raise ValueError(
                "no agent of this workflow uses FlashMoAChatClient; there is nothing to link. Give "
                "the agents one as their client."
            )
        self.listener = listener
        self._workflow = workflow
        self._clients: set[FlashMoAChatClient] = set()
        self._planner = WorkflowLinkPlanner(workflow, include, listener, self._add_client)
        previous: WorkflowLink | None = getattr(workflow, _LINK_ATTRIBUTE, None)
        if previous is not None:
            previous._retire()
        setattr(workflow, _LINK_ATTRIBUTE, self)
        for client in clients:
            if client is not None:
                self._add_client(client)

    async def close(self) -> None:
        """End every link and wait until the engines have their KV back.

        The workflow can still run.
        """
        self._retire()
        await self._planner.host.close()

    def observe(self, request: CallRequest) -> LinkedCall | None:
        """Return the observer of a request, if it is made for one of this workflow's executors."""
        executor = _find_calling_executor()
        if executor is None or self._workflow.executors.get(executor.id) is not executor:
            return None
        try:
            return self._planner.observe(executor, request)
        except Exception:
            # Whatever is wrong with a link, the agent's request must be sent.
            logger.exception("%s runs unlinked because of the error below", executor.id)
            return None

    def _add_client(self, client: FlashMoAChatClient) -> None:
        client.linked_workflows.add(self)
        self._clients.add(client)

    def _retire(self) -> None:
        for client in self._clients:
            client.linked_workflows.discard(self)
        self._planner.end_all("closed")
        end_trace(self.listener)


def _find_calling_executor() -> Executor | None:
    """Return the executor on whose behalf this code runs, if the stack shows one.

    ``None`` if the request is that of another agent, which the executor's agent uses, for instance
    as a tool.

    Agent Framework has no context that names the executor or agent that is running: its
    ContextVars hold the origin of events, opaque identities of runs, and telemetry. A ContextVar
    of ours would have to be set by replacing methods of the user's executors and agents.
    """
    frame: FrameType | None = sys._getframe(1)
    agents: list[object] = []
    while frame is not None:
        holder = frame.f_locals.get("self")
        if isinstance(holder, Executor):
            own = isinstance(holder, AgentExecutor) and holder.agent
            return None if own and any(agent is not own for agent in agents) else holder
        if isinstance(holder, BaseAgent):
            agents.append(holder)
        frame = frame.f_back
    return None
