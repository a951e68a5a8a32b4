"""One request of a linked agent, and what it tells the links that wait for its text."""

from __future__ import annotations

from abc import ABC, abstractmethod

from flashmoa.linking.link import Link
from flashmoa.linking.observed_call import CallObserver, CallRequest, CallResult
from flashmoa.linking.streamed_text import Text
from flashmoa.observe import Listener
from flashmoa.observe.calls import CallReporter


class CallOwner(ABC):
    """The planner that a linked call reports to.

    Attributes:
        listener: is told what happens.
        streams: whether text is streamed into links, or only what is known beforehand sent.
    """

    listener: Listener
    streams: bool

    @abstractmethod
    def waiting_for(self, agent: str) -> list[Link]:
        """Return the links that wait for an agent's text."""

    @abstractmethod
    def finished(self, call: LinkedCall) -> None:
        """Note that what others get of a call is known in full."""

    @abstractmethod
    def failed(self, call: LinkedCall) -> None:
        """Note that what a call would have given to others is not known any more."""

    @abstractmethod
    def held_back(self, call: LinkedCall, reason: str) -> None:
        """Note that a call has ended and others were given nothing of it; links wait on."""

    @abstractmethod
    def release(self, link: Link) -> None:
        """Have the engine release a link's stream that its request did not use."""


class LinkedCall(CallObserver):
    """A request of an agent of a linked team.

    Args:
        agent: who makes it.
        own: the link to its prompt, which it claims.
        rewritten: why others never get its text as it is, if so.
        early: whether it came before a link to it was begun that would have been.

    Attributes:
        text: what others get of it.
    """

    def __init__(
        self,
        owner: CallOwner,
        agent: str,
        request: CallRequest,
        own: Link | None,
        *,
        rewritten: str | None,
        early: bool,
    ) -> None:
        self.agent = agent
        self.text = Text(agent)
        self.prompt_stream_id = own.claim() if own is not None else None
        self._owner = owner
        self._own = own
        self._held = rewritten or request.held
        self._rewritten = rewritten is not None
        self._report = CallReporter(
            owner.listener, agent=agent, engine=request.engine, model=request.model
        )
        late = early or (own is not None and own.is_late)
        self._report.started(self.prompt_stream_id, late=late)

    def on_text(self, text: str) -> None:
        self._report.text_arrived()
        if self._held is None and self._owner.streams:
            self.text.write(text)

    def on_finish(self, result: CallResult) -> None:
        """Complete the text, or end the links that were given something others will not get."""
        self._report.finished(result.text, result.usage, result.finish_reason)
        if not self._owner.streams:
            return
        written = self.text.written
        is_forwarded = result.is_forwarded and not self._rewritten
        if is_forwarded and result.text.startswith(written):
            self.text.finish(result.text)
            self._owner.finished(self)
        elif written:
            # A tool call, or text that is rewritten: what others get is something else.
            for link in self._owner.waiting_for(self.agent):
                link.end("abort")
            self._owner.failed(self)
        else:
            self._owner.held_back(self, self._held or "it calls tools")

    def on_failure(self, error: BaseException) -> None:
        self._report.failed(error)
        self._owner.failed(self)
        self.text.fail(error)
        # The request may not have reached the engine, which then still keeps its stream.
        self.release_stream()

    def release_stream(self) -> None:
        if self._own is not None:
            self._owner.release(self._own)
