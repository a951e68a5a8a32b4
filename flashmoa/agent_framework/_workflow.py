"""Linking a workflow."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from agent_framework import AgentExecutor, BaseAgent, Executor, Workflow

from flashmoa.agent_framework._calls import Call
from flashmoa.agent_framework._client import FlashMoAChatClient
from flashmoa.agent_framework._dry_runs import client_of
from flashmoa.agent_framework._outlook import Outlook
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
        trace: a file that everything that happens is written to, for ``flashmoa trace``.
        listener: is told everything that happens.

    Raises:
        TypeError: not a workflow.
        OSError: the trace cannot be written.
        ValueError: no agent of the workflow uses a FlashMoA client; ``include`` names an executor
            there is not.
    """
    if not isinstance(workflow, Workflow):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"only a Workflow can be linked, not a {type(workflow).__name__}; build it")
    if unknown := [name for name in include if name not in workflow.executors]:
        raise ValueError(f"include names {unknown}; the workflow has {sorted(workflow.executors)}")
    if trace is not None:
        listener = both(contained(Trace(trace)), contained(listener))
    return WorkflowLink(workflow, frozenset(include), contained(listener))


class WorkflowLink:
    """The links of one workflow; made by :func:`link`.

    It ends with its clients, or by itself.
    """

    def __init__(self, workflow: Workflow, include: Collection[str], listener: Listener) -> None:
        clients = {client_of(executor) for executor in workflow.executors.values()} - {None}
        if not clients:
            raise ValueError(
                "no agent of this workflow uses FlashMoAChatClient; there is nothing to link"
            )
        self._workflow = workflow
        self._clients: set[FlashMoAChatClient] = set()
        self._outlook = Outlook(workflow, include, listener, self._watch)
        before: WorkflowLink | None = getattr(workflow, _LINK, None)
        if before is not None:
            before._retire()
        setattr(workflow, _LINK, self)
        for client in clients:
            self._watch(client)

    async def close(self) -> None:
        """End every link and wait until their engines have the KV back; the workflow runs on."""
        self._retire()
        await self._outlook.host.close()

    def begin(self, url: str, options: Mapping[str, Any]) -> Call | None:
        """A client is about to send a request, maybe for one of this workflow's executors."""
        executor = _asking()
        if executor is None or self._workflow.executors.get(executor.id) is not executor:
            return None
        try:
            return self._outlook.begin(executor, url, options)
        except Exception:
            # Whatever is wrong with a link, the agent's request goes out.
            logger.exception("%s runs unlinked", executor.id)
            return None

    def _watch(self, client: FlashMoAChatClient | None) -> None:
        if client is not None:
            client.watchers.add(self)
            self._clients.add(client)

    def _retire(self) -> None:
        for client in self._clients:
            client.watchers.discard(self)
        self._outlook.end_all("closed")


def _asking() -> Executor | None:
    """The executor on whose behalf this code runs, found on the stack, where it awaits its model;
    not where another agent asks, that its own uses as a tool for instance."""
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
