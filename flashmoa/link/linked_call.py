"""Hear one request of an agent of a linked team (:class:`LinkedCall`)."""

from __future__ import annotations

from typing import Protocol

from flashmoa._concurrency import TaskHost
from flashmoa.engine import EngineClient
from flashmoa.link.calls import CallObserver, CallRequest, CallResult, OutputLengths
from flashmoa.link.hearing import CallChannel
from flashmoa.link.link import Link
from flashmoa.link.options import Session
from flashmoa.link.streamed_text import Text
from flashmoa.observe import Listener
from flashmoa.observe.calls import CallReporter


class Planner(Protocol):
    """The part of :class:`~flashmoa.link.planner.LinkPlanner` that a call uses."""

    listener: Listener
    streams: bool
    session: Session
    output_lengths: OutputLengths
    host: TaskHost

    def session_of(self, agent: str) -> str: ...
    def channel_to(self, engine: EngineClient) -> CallChannel: ...
    def call_answered(self, call: LinkedCall, result: CallResult) -> None: ...
    def call_failed(self, call: LinkedCall) -> None: ...


class LinkedCall(CallObserver):
    """A request of an agent of a linked team.

    Args:
        agent: the name of the agent that makes the request.
        own_link: the link to the request's prompt, if any; the request claims its stream.
        rewritten: see :meth:`LinkPlanner.begin`.
        unlinked: why there is no ``own_link``, for reports.

    Attributes:
        text: the text that other agents get.
        takes_text: whether they get it as it arrives.
        hold_reason: why they do not get it as it arrives; ``None`` if they do.
    """

    def __init__(
        self,
        planner: Planner,
        agent: str,
        request: CallRequest,
        own_link: Link | None = None,
        *,
        rewritten: str | None = None,
        unlinked: str = "",
    ) -> None:
        report = CallReporter(
            planner.listener, agent=agent, engine=request.engine, model=request.model
        )
        super().__init__(report)
        self.agent = agent
        self.text = Text(agent)
        self.is_rewritten = rewritten is not None
        self.hold_reason = rewritten or request.hold_reason
        self.takes_text = planner.streams and self.hold_reason is None
        if self.takes_text and request.client is not None:
            self.channel = planner.channel_to(request.client)
        self.prompt_stream_id = own_link.claim() if own_link is not None else None
        self.headers = {
            **planner.session.headers(planner.session_of(agent)),
            **planner.output_lengths.headers(agent),
        }
        self._planner = planner
        self._engine_url = request.engine
        self._is_over = False
        self._own_link = own_link
        if own_link is None:
            report.started(None, unlinked)
        else:
            report.started(own_link.used_id, own_link.unused_reason)

    @property
    def why_unheard(self) -> str | None:
        """Why other agents get its text only when it is complete, if there is a reason."""
        if self.hold_reason is not None or self.channel is None:
            return self.hold_reason
        return self.channel.problem

    def on_named(self, call_id: str) -> None:
        if self.takes_text:
            self.text.name_call(self._engine_url, call_id)

    def on_text(self, text: str) -> None:
        if self._is_over:
            return  # Another thread was late.
        super().on_text(text)
        if self.takes_text:
            self.text.write(text)

    def on_finish(self, result: CallResult) -> None:
        self._is_over = True
        super().on_finish(result)
        self._planner.call_answered(self, result)
        if self._own_link is not None and self._own_link.is_unnamed:
            self.release_stream()

    def on_failure(self, error: BaseException) -> None:
        self._is_over = True
        super().on_failure(error)
        self._planner.call_failed(self)
        self.text.fail(error)
        # If the request has not reached the engine, the engine still keeps the stream.
        self.release_stream()

    def release_stream(self) -> None:
        if self._own_link is not None:
            self._planner.host.start_cleanup(self._own_link.delete_stream)
