"""One call of an agent of a linked team, and what it tells the links that wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from autogen_core.models import CreateResult

from flashmoa.engine import PromptUsage
from flashmoa.failures import failure_of
from flashmoa.links import Link
from flashmoa.observe import CallFailed, CallFinished, FirstToken, LinkWaits, Listener


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
        own: the link to its prompt, which it takes over.
        held: why others do not get its text as it comes, if so; ``rewritten``: or why never.
    """

    def __init__(
        self,
        audience: Audience,
        agent: str,
        engine: str,
        own: Link | None,
        *,
        held: str | None,
        rewritten: str | None,
    ) -> None:
        self.agent = agent
        self.prompt_stream_id = own.take_over() if own is not None else None
        # Whether the message others get from this agent is known in full.
        self.complete = False
        self._own = own
        self._audience = audience
        self._engine = engine
        self._held = rewritten or held
        self._rewritten = rewritten is not None
        self._text: list[str] = []
        self._begun = False
        self._tell = audience.listener

    def replay(self, link: Link) -> None:
        """Give a link that waits for this agent what it missed."""
        if self._text:
            link.feed(self.agent, "".join(self._text))
        if self.complete:
            link.close_slot(self.agent)

    def on_text(self, text: str) -> None:
        if not self._begun:
            self._begun = True
            self._tell(FirstToken(agent=self.agent, engine=self._engine))
        if self._held is not None:
            return
        self._text.append(text)
        if self._audience.streams:
            self._each(lambda link: link.feed(self.agent, text))

    def on_finish(self, result: CreateResult, usage: PromptUsage | None, raw: bool) -> None:
        text = result.content if isinstance(result.content, str) else None
        self._tell(
            CallFinished(agent=self.agent, engine=self._engine, text=text or "", usage=usage)
        )
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
        self._tell(CallFailed(agent=self.agent, engine=self._engine, error=repr(error)))
        self._audience.failed(self)
        self._each(lambda link: link.fail_slot(self.agent, failure_of(error)))
        # The request may not have reached the engine, which then still keeps its stream.
        self.give_back()

    def give_back(self) -> None:
        if self._own is not None:
            self._audience.give_back(self._own)

    def _say_why(self, reason: str) -> None:
        for link in self._audience.waiting_for(self.agent):
            self._tell(
                LinkWaits(
                    agent=link.agent, engine=link.engine.url, upstream=self.agent, reason=reason
                )
            )

    def _each(self, act: Callable[[Link], object]) -> None:
        for link in self._audience.waiting_for(self.agent):
            act(link)
