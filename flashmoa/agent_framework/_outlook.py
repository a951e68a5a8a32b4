"""What a workflow is about to ask: a link to every executor whose prompt is partly known."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
from agent_framework import AgentExecutorResponse, Executor, Message, Workflow

from flashmoa._concurrency import Repeated, TaskHost
from flashmoa.agent_framework._calls import Call
from flashmoa.agent_framework._deliveries import Delivery, deliveries
from flashmoa.agent_framework._dry_runs import (
    DryRun,
    NotForecastable,
    dry_run,
    heard_by,
    response,
    rewrites,
)
from flashmoa.engine import EngineError, PluginMissing
from flashmoa.linking.link import Link, report_plain_engine
from flashmoa.linking.placeholders import StandIns
from flashmoa.linking.prompt import Prompt
from flashmoa.linking.streamed_text import Text
from flashmoa.observe import LinkDeclined, LinkWaits, Listener
from flashmoa.observe.calls import CallReporter

logger = logging.getLogger(__name__)

_END_POLL_SECONDS = 0.2


@dataclass(slots=True)
class Speaker:
    """An executor that has begun; ``heard``: the conversation it was given."""

    text: Text
    heard: list[Message]
    called_tools: bool = False


@dataclass(slots=True)
class Round:
    """What is known of one run of the workflow, by executors' ids."""

    stand_ins: StandIns
    speakers: dict[str, Speaker] = field(default_factory=dict[str, Speaker])
    texts: dict[str, Text] = field(default_factory=dict[str, Text])
    links: dict[str, Link] = field(default_factory=dict[str, Link])
    # To whom a link is being made.
    making: set[str] = field(default_factory=set[str])

    def text(self, name: str) -> Text:
        """What an executor writes, or will."""
        return self.texts.setdefault(name, Text(name))


class Outlook:
    """The links of one workflow.

    Args:
        include: executors of the user's own classes that may be run on copies.
        watched: is called with each client that an executor turns out to ask.
    """

    def __init__(
        self,
        workflow: Workflow,
        include: Collection[str],
        listener: Listener,
        watched: Any,
    ) -> None:
        self.host = TaskHost()
        self._workflow = workflow
        self._deliveries = deliveries(workflow)
        self._include = include
        self._listener = listener
        self._watched = watched
        self._declined: set[str] = set()
        self._round = self._next_round()
        self._looking = Repeated(self.host, lambda: self._look_ahead(self._round))
        self._watching = Repeated(self.host, self._watch_end)

    def begin(self, executor: Executor, url: str, options: Mapping[str, Any]) -> Call:
        """A request of an executor goes out."""
        name = executor.id
        before = self._round.speakers.get(name)
        if before is not None and before.text.is_over:
            self.end_all("unused")  # It begins again: another run.
        this = self._round
        text = this.text(name)
        this.speakers.setdefault(name, Speaker(text, heard_by(executor)))
        call = Call(
            CallReporter(self._listener, agent=name, engine=url, model=options["model"]),
            text=text if rewrites(executor) is None else None,
            held=bool(options.get("tools")),
            own=this.links.pop(name, None),
            late=name in this.making,
            give_back=lambda link: self.host.finish(link.delete_stream),
            called_tools=lambda: self._called_tools(this, name),
        )
        # In the background: nothing the user waits for waits for a link.
        self._look()
        return call

    def end_all(self, reason: str) -> None:
        """No call will come any more that could use a link."""
        for link in self._round.links.values():
            link.end(reason)
        self._round = self._next_round()

    def _next_round(self) -> Round:
        return Round(StandIns(self._workflow.executors))

    def _called_tools(self, this: Round, name: str) -> None:
        """Others get its calls and their results, too, which nobody can tell."""
        this.speakers[name].called_tools = True
        for link in this.links.values():
            if link.waits_for(name):
                self._listener(
                    LinkWaits(
                        agent=link.agent,
                        engine=link.engine.url,
                        upstream=name,
                        reason="it calls tools",
                    )
                )
                link.end("mispredicted")

    def _look(self) -> None:
        """Have the links brought up to date, once for all reasons there are by then."""
        self._looking.want()
        self._watching.ensure()

    async def _watch_end(self) -> None:
        """A workflow that has ended, in whatever way, tells nobody."""
        while self._workflow._is_run_active():  # noqa: ASYNC110
            await anyio.sleep(_END_POLL_SECONDS)
        self.end_all("unused")

    async def _look_ahead(self, this: Round) -> None:
        """Follow the edges from those who have begun, as far as prompts can be told."""
        sent = self._sent(this)
        left = [one for one in self._deliveries if one.target not in this.speakers]
        while ready := [one for one in left if all(name in sent for name in one.sources)]:
            left = [one for one in left if one not in ready]
            for delivery in ready:
                message = delivery.message([sent[name] for name in delivery.sources])
                ahead = await self._serve(this, delivery, message)
                if this is not self._round:
                    return
                if ahead is not None:
                    sent[delivery.target] = ahead

    def _sent(self, this: Round) -> dict[str, AgentExecutorResponse]:
        """What those who have begun will send on, with stand-ins for their texts."""
        sent: dict[str, AgentExecutorResponse] = {}
        for name, speaker in this.speakers.items():
            executor = self._workflow.executors[name]
            if rewrites(executor) is None and not speaker.called_tools:
                sent[name] = response(executor, speaker.heard, this.stand_ins.padded(name))
        return sent

    async def _serve(
        self, this: Round, delivery: Delivery, message: Any
    ) -> AgentExecutorResponse | None:
        """Have a link to an executor; what it will send on, if that can be told."""
        name = delivery.target
        if name in self._declined:
            return None
        executor = self._workflow.executors[name]
        this.making.add(name)
        try:
            run = await dry_run(
                self._workflow, executor, message, delivery.sources, name in self._include
            )
            self._watched(run.request.client)
            await self._link(this, name, run)
            if rewrites(executor) is None:
                return response(executor, run.heard, this.stand_ins.padded(name))
        except NotForecastable as reason:
            self._decline(name, str(reason))
        except ValueError as error:  # Its chat template shows a text twice.
            self._decline(name, str(error))
        finally:
            this.making.discard(name)
        return None

    async def _link(self, this: Round, name: str, run: DryRun) -> None:
        there = this.links.get(name)
        if there is not None and not there.is_over:
            return
        engine = run.request.client.engine
        try:
            prompt = Prompt(this.stand_ins.segments(await run.request.render()))
        except PluginMissing as problem:
            self._declined.add(name)
            report_plain_engine(engine.url, problem)
            return
        except EngineError as error:
            logger.warning("No link to %s this time: %s", name, error)
            return
        if this is not self._round or name in this.speakers:
            return
        namespace = run.request.namespace
        link = Link(engine, prompt, agent=name, namespace=namespace, listener=self._listener)
        for slot in prompt.slots:
            this.text(slot.name).follow(link)
        this.links[name] = link
        self.host.start(link.run)

    def _decline(self, name: str, reason: str) -> None:
        self._declined.add(name)
        logger.warning("%s runs unlinked: %s", name, reason)
        self._listener(LinkDeclined(agent=name, engine="", reason=reason))
