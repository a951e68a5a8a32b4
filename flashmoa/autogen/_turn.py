"""One call of an agent of a linked team, and what it tells the links that wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from autogen_core.models import CreateResult

from flashmoa.autogen._calls import Request
from flashmoa.engine import PromptUsage
from flashmoa.linking.failure_policy import failure_of
from flashmoa.linking.link import Link
from flashmoa.observe import LinkWaits, Listener
from flashmoa.observe.calls import CallReporter


class Audience(Protocol):
    """Who hears a call: the links that wait for its text, and the outlook on what follows."""

    listener: Listener
    # Whether text is streamed into links, or only what is known beforehand sent.
    streams: bool

    def waiting_for(self, agent: str) -> list[Link]: ...

    def finished(self, turn: RunningTurn) -> None: ...

    def failed(self, turn: RunningTurn) -> None: ...

    def give_back(self, link: Link) -> None: ...


class RunningTurn:
    """A call (a ``CallObserver``).

    Args:
        agent: who makes it.
        request: what it sends.
        own: the link to its prompt, which it takes over.
        rewritten: why others never get its text as it comes, if so.
        early: whether it came before a link to it was begun that would have been.
    """

    def __init__(
        self,
        audience: Audience,
        agent: str,
        request: Request,
        own: Link | None,
        *,
        rewritten: str | None,
        early: bool,
    ) -> None:
        self.agent = agent
        self.prompt_stream_id = own.take_over() if own is not None else None
        # Whether the message others get from this agent is known in full.
        self.complete = False
        self._own = own
        self._audience = audience
        self._held = rewritten or request.held
        self._rewritten = rewritten is not None
        self._text: list[str] = []
        self._report = CallReporter(
            audience.listener, agent=agent, engine=request.engine, model=request.model
        )
        late = early or (own is not None and own.is_late)
        self._report.started(self.prompt_stream_id, late=late)

    def replay(self, link: Link) -> None:
        """Give a link that waits for this agent what it missed."""
        if self._text:
            link.feed(self.agent, "".join(self._text))
        if self.complete:
            link.close_slot(self.agent)

    def on_text(self, text: str) -> None:
        self._report.text()
        if self._held is not None:
            return
        self._text.append(text)
        if self._audience.streams:
            self._each(lambda link: link.feed(self.agent, text))

    def on_finish(self, result: CreateResult, usage: PromptUsage | None, raw: bool) -> None:
        text = result.content if isinstance(result.content, str) else None
        self._report.finished(text or "", usage, result.finish_reason)
        if not self._audience.streams:
            return
        streamed = "".join(self._text)
        if raw and not self._rewritten and text is not None and text.startswith(streamed):
            self._text, self.complete = [text], True
            self._each(lambda link: link.feed(self.agent, text[len(streamed) :]))
            self._each(lambda link: link.close_slot(self.agent))
            self._audience.finished(self)
        elif streamed:
            # A tool call, or text that is rewritten: what flows on is something else.
            self._text = []
            self._each(lambda link: link.end("abort"))
            self._audience.failed(self)
        else:
            self._say_why(self._held or "it calls tools")

    def on_failure(self, error: BaseException) -> None:
        self._report.failed(error)
        self._audience.failed(self)
        self._each(lambda link: link.fail_slot(self.agent, failure_of(error)))
        # The request may not have reached the engine, which then still keeps its stream.
        self.give_back()

    def give_back(self) -> None:
        if self._own is not None:
            self._audience.give_back(self._own)

    def _say_why(self, reason: str) -> None:
        for link in self._audience.waiting_for(self.agent):
            self._audience.listener(
                LinkWaits(
                    agent=link.agent, engine=link.engine.url, upstream=self.agent, reason=reason
                )
            )

    def _each(self, act: Callable[[Link], object]) -> None:
        for link in self._audience.waiting_for(self.agent):
            act(link)
