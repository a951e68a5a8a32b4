"""Link a workflow's agents (``link``)."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from agent_framework import Executor, Workflow

from flashmoa.agent_framework._client import FlashMoAChatClient
from flashmoa.agent_framework._link_planner import WorkflowLinkPlanner
from flashmoa.agent_framework._predictability import client_of, holds_workflow
from flashmoa.linking.calls import CallRequest
from flashmoa.linking.planner import LinkedCall
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
            agents with middleware (also of the client or the run), compaction strategies, context
            providers or MCP servers run unlinked.
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
    clients = _find_clients(workflow)
    previous: WorkflowLink | None = getattr(workflow, _LINK_ATTRIBUTE, None)
    listener = add_trace(
        listener,
        trace,
        prompts=trace_prompts,
        successor_of=previous.listener if previous is not None else None,
    )
    return WorkflowLink(workflow, clients, frozenset(include), listener)


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


class WorkflowLink:
    """Links one workflow, until it or the workflow's clients are closed.

    Use :func:`link` to make one.

    Attributes:
        listener: receives its events.
    """

    def __init__(
        self,
        workflow: Workflow,
        clients: Collection[FlashMoAChatClient],
        include: Collection[str],
        listener: Listener,
    ) -> None:
        self.listener = listener
        self._workflow = workflow
        self._is_retired = False
        self._clients: set[FlashMoAChatClient] = set()
        self._planner = WorkflowLinkPlanner(workflow, include, listener, self._add_client)
        previous: WorkflowLink | None = getattr(workflow, _LINK_ATTRIBUTE, None)
        if previous is not None:
            previous._retire()
        setattr(workflow, _LINK_ATTRIBUTE, self)
        for client in clients:
            self._add_client(client)

    async def close(self) -> None:
        """End every link and wait until the engines have their KV back.

        The workflow can still run.
        """
        self._retire()
        await self._planner.host.close()

    def observe(self, executor: Executor, request: CallRequest) -> LinkedCall | None:
        """Return the observer of an executor's request, if the executor is of this workflow."""
        if self._workflow.executors.get(executor.id) is not executor:
            return None
        try:
            return self._planner.observe(executor, request)
        except Exception:
            # Whatever is wrong with a link, the agent's request must be sent.
            logger.exception("%s runs unlinked because of the error below", executor.id)
            return None

    def _add_client(self, client: FlashMoAChatClient) -> None:
        if self._is_retired:  # A dry run has ended after its link was closed or replaced.
            return
        client.linked_workflows.add(self)
        self._clients.add(client)

    def _retire(self) -> None:
        self._is_retired = True
        for client in self._clients:
            client.linked_workflows.discard(self)
        self._planner.end_all("closed")
        end_trace(self.listener)
