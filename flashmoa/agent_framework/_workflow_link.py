"""Linking a workflow."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from pathlib import Path
from types import FrameType

from agent_framework import AgentExecutor, BaseAgent, Executor, Workflow

from flashmoa.agent_framework._client import FlashMoAChatClient
from flashmoa.agent_framework._dry_run import client_of
from flashmoa.agent_framework._link_planner import WorkflowLinkPlanner
from flashmoa.linking.linked_call import LinkedCall
from flashmoa.linking.observed_call import CallRequest, LinkedTeam
from flashmoa.observe import Listener, both, contained, ignore
from flashmoa.observe.trace import Trace

logger = logging.getLogger(__name__)

# The link of a workflow lives and dies with it.
_LINK = "_flashmoa_link"


def link(
    workflow: Workflow,
    *,
    include: Collection[str] = (),
    trace: Path | str | None = None,
    listener: Listener = ignore,
) -> WorkflowLink:
    """Link a workflow's agents: each one's tokens stream into the prompts of those after it.

    One call after building the workflow is all; runs, prompts and answers stay the same. Linking
    a workflow again replaces the first link.

    Args:
        workflow: of ``SequentialBuilder``, ``ConcurrentBuilder``, or of ``WorkflowBuilder`` where
            edges have no conditions. Its agents' clients must be ``FlashMoAChatClient``; agents
            with other clients, of your own classes, or with middleware, context providers or MCP
            servers run unlinked.
        include: ids of executors that are code of your own and are to be linked, too: a
            ``ConcurrentBuilder``'s aggregator (of a callback its name), or an agent of those
            above. To tell what one will ask, it is run on a copy, up to the call of its model.
        trace: a file that all events are written to, for ``flashmoa trace``.
        listener: receives all events.

    Raises:
        TypeError: not a workflow.
        OSError: the trace cannot be written.
        ValueError: no agent of the workflow uses a FlashMoA client; ``include`` names an unknown
            executor.
    """
    if not isinstance(workflow, Workflow):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"only a Workflow can be linked, not a {type(workflow).__name__}; build it")
    if unknown := [name for name in include if name not in workflow.executors]:
        raise ValueError(f"include names {unknown}; the workflow has {sorted(workflow.executors)}")
    if trace is not None:
        listener = both(contained(Trace(trace)), contained(listener))
    return WorkflowLink(workflow, frozenset(include), contained(listener))


class WorkflowLink(LinkedTeam):
    """The links of one workflow; made by :func:`link`.

    It ends with its clients, or by itself.
    """

    def __init__(self, workflow: Workflow, include: Collection[str], listener: Listener) -> None:
        found = [client_of(executor) for executor in workflow.executors.values()]
        if not any(found):
            raise ValueError(
                "no agent of this workflow uses FlashMoAChatClient; there is nothing to link"
            )
        self._workflow = workflow
        self._clients: set[FlashMoAChatClient] = set()
        self._planner = WorkflowLinkPlanner(workflow, include, listener, self._watch)
        before: WorkflowLink | None = getattr(workflow, _LINK, None)
        if before is not None:
            before._retire()
        setattr(workflow, _LINK, self)
        for client in found:
            if client is not None:
                self._watch(client)

    async def close(self) -> None:
        """End every link and wait until their engines have the KV back; the workflow runs on."""
        self._retire()
        await self._planner.host.close()

    def observe(self, request: CallRequest) -> LinkedCall | None:
        """Return the observer of a request, if it is made for one of this workflow's executors."""
        executor = _asking()
        if executor is None or self._workflow.executors.get(executor.id) is not executor:
            return None
        try:
            return self._planner.observe(executor, request)
        except Exception:
            # Whatever is wrong with a link, the agent's request goes out.
            logger.exception("%s runs unlinked", executor.id)
            return None

    def _watch(self, client: FlashMoAChatClient) -> None:
        client.linked.add(self)
        self._clients.add(client)

    def _retire(self) -> None:
        for client in self._clients:
            client.linked.discard(self)
        self._planner.end_all("closed")


def _asking() -> Executor | None:
    """Return the executor on whose behalf this code runs, as the stack tells.

    ``None`` where another agent asks, which the executor's agent uses as a tool for instance.

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
            return None if own and any(one is not own for one in agents) else holder
        if isinstance(holder, BaseAgent):
            agents.append(holder)
        frame = frame.f_back
    return None
