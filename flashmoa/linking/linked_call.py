"""Report a request of a linked agent, and feed its text to the links that wait for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from flashmoa.linking.link import Link
from flashmoa.linking.observed_call import CallObserver, CallRequest, CallResult
from flashmoa.linking.output_lengths import OutputLengths
from flashmoa.linking.prompt_feed import is_known_to_have_plugin
from flashmoa.linking.streamed_text import Text
from flashmoa.observe import Listener
from flashmoa.observe.calls import CallReporter


class CallOwner(ABC):
    """The planner that a linked call reports to.

    Attributes:
        listener: receives the events.
        streams: whether text is streamed into links; if not, links only send what is known
            beforehand.
        output_lengths: those of the answers of its agents.
    """

    listener: Listener
    streams: bool
    output_lengths: OutputLengths

    @abstractmethod
    def waiting_for(self, agent: str) -> list[Link]:
        """Return the links that wait for an agent's text."""

    @abstractmethod
    def call_finished(self, call: LinkedCall) -> None:
        """Note that the text which other agents get from a call is complete."""

    @abstractmethod
    def tools_called(self, call: LinkedCall, answer: object) -> None:
        """Note that a call's answer calls tools; ``answer`` is ``CallResult.tool_calls``."""

    @abstractmethod
    def call_taken_back(self, call: LinkedCall) -> None:
        """Note that other agents will not get the text of a call, which links were fed."""

    @abstractmethod
    def call_failed(self, call: LinkedCall) -> None:
        """Note that other agents will not get the text of a call."""

    @abstractmethod
    def call_held_back(self, call: LinkedCall, reason: str) -> None:
        """Note that a call has ended without giving text to other agents; links keep waiting."""

    @abstractmethod
    def release(self, link: Link) -> None:
        """Release the stream of a link, which its request did not use, in the background."""


class LinkedCall(CallObserver):
    """A request of an agent of a linked team.

    Args:
        agent: the name of the agent that makes the request.
        own_link: the link to the request's prompt, if there is one; the request claims its stream.
        rewrite_reason: why other agents never get this text unchanged; ``None`` if they do.
        missed_link: whether the request came before the planner had made its link.

    Attributes:
        text: the text that other agents get.
    """

    def __init__(
        self,
        owner: CallOwner,
        agent: str,
        request: CallRequest,
        own_link: Link | None,
        *,
        rewrite_reason: str | None,
        missed_link: bool,
    ) -> None:
        self.agent = agent
        self.text = Text(agent)
        self.prompt_stream_id = own_link.claim() if own_link is not None else None
        # Other servers do not know the field, and some refuse a request that has it.
        knows = is_known_to_have_plugin(request.engine)
        self.expected_output_tokens = owner.output_lengths.expect(agent) if knows else None
        self._owner = owner
        self._own_link = own_link
        self._hold_reason = rewrite_reason or request.hold_reason
        self._is_rewritten = rewrite_reason is not None
        self._report = CallReporter(
            owner.listener, agent=agent, engine=request.engine, model=request.model
        )
        late = missed_link or (own_link is not None and own_link.is_late)
        self._report.started(own_link.used_id if own_link is not None else None, late=late)

    def on_prompt(self, body: Mapping[str, Any]) -> None:
        self._report.prompt_sent(body)

    def on_text(self, text: str) -> None:
        self._report.text_arrived()
        if self._hold_reason is None and self._owner.streams:
            self.text.write(text)

    def on_finish(self, result: CallResult) -> None:
        """Complete the text, or end the links that were fed text which others will not get."""
        self._report.finished(result.text, result.usage, result.finish_reason)
        if result.usage is not None:
            self._owner.output_lengths.add(self.agent, result.usage.completion_tokens)
        if result.tool_calls is not None:
            self._owner.tools_called(self, result.tool_calls)
        if not self._owner.streams:
            return
        written = self.text.written
        is_forwarded = result.is_forwarded and not self._is_rewritten
        if is_forwarded and result.text.startswith(written):
            self.text.finish(result.text)
            self._owner.call_finished(self)
        elif written:
            # Other agents get something else: the result of a tool call, or a rewritten text.
            self._owner.call_taken_back(self)
        else:
            self._owner.call_held_back(self, self._hold_reason or "it calls tools")

    def on_failure(self, error: BaseException) -> None:
        self._report.failed(error)
        self._owner.call_failed(self)
        self.text.fail(error)
        # If the request has not reached the engine, the engine still keeps the stream.
        self.release_stream()

    def release_stream(self) -> None:
        if self._own_link is not None:
            self._owner.release(self._own_link)
