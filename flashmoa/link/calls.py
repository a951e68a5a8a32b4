"""Notify observers (:class:`CallObserver`) of a model client's request, and remember the lengths of
answers (:class:`OutputLengths`)."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Any, Self, TypeVar

from flashmoa._concurrency import setting
from flashmoa._limits import Recent
from flashmoa.engine import EngineClient, PromptUsage
from flashmoa.engine.wire import TOKENS_HEADER
from flashmoa.link.hearing import CallChannel
from flashmoa.observe.calls import CallReporter

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A request that is about to be sent.

    Attributes:
        engine: the URL of its engine.
        model: the model name in the request.
        hold_reason: why other agents do not get its text as it arrives; ``None`` if they do.
        client: a client of its engine, which hears a whole answer while it is written; ``None`` if
            the answer is not to be heard.
    """

    engine: str
    model: str
    hold_reason: str | None = None
    client: EngineClient | None = None


@dataclass(frozen=True, slots=True)
class CallResult:
    """A complete answer.

    Attributes:
        text: its text as the framework returns it; may be empty.
        usage: the token usage, if the engine reported it.
        finish_reason: OpenAI's ``finish_reason``.
        is_forwarded: whether other agents get exactly this text; they do not if the answer is a
            tool call, or is rewritten.
        tool_calls: an answer that calls tools, in a form for the framework's planner; ``None`` if
            it calls none, or the planner does not ask for it.
    """

    text: str
    usage: PromptUsage | None
    finish_reason: str | None
    is_forwarded: bool
    tool_calls: object = None


class CallObserver:
    """Hears one request of a model client; this base class only passes the news to a report.

    Args:
        report: reports the request to a listener.

    Attributes:
        prompt_stream_id: the id of the prompt stream that it offers to the request, if any.
        headers: further headers of the request, which do not replace the request's own.
        channel: brings the text of a whole answer while it is written, if there is a channel.
    """

    prompt_stream_id: str | None = None
    headers: Mapping[str, str] = MappingProxyType({})
    channel: CallChannel | None = None
    report: CallReporter | None = None

    def __init__(self, report: CallReporter | None = None) -> None:
        self.report = report

    def on_prompt(self, body: Mapping[str, Any]) -> None:
        """Receive the body of the chat completion, as it is about to be sent."""
        if self.report is not None:
            self.report.prompt_sent(body)

    def on_response(self, close: Callable[[], Awaitable[None]]) -> None:
        """Receive the function that closes the answer's connection, if its reader does not."""

    def on_named(self, call_id: str) -> None:
        """Receive the engine's id for the HTTP request that is about to be sent."""

    def on_text(self, text: str) -> None:
        """Receive the next part of the answer's text."""
        if self.report is not None:
            self.report.text_arrived()

    def on_finish(self, result: CallResult) -> None:
        """Receive the complete answer."""
        if self.report is not None:
            self.report.finished(result.text, result.usage, result.finish_reason)

    def on_failure(self, error: BaseException) -> None:
        """Note that the request failed with ``error``, or was cancelled."""
        if self.report is not None:
            self.report.failed(error)

    def release_stream(self) -> None:
        """Release the offered prompt stream: the request uses another one, or failed."""


class ObservedCall:
    """A context manager around one call, which notifies the call's observers.

    If it is left without :meth:`finish`, it notifies them of a failure. Observers do not notice if
    the client repeats the call's request.

    Attributes:
        prompt_stream_id: the id of the prompt stream that the request is to use, if any. If several
            observers offer a stream, the request uses the last, and the others are released.
        headers, channel: see :class:`CallObserver`.
        answer: the complete answer that came over the network, if :meth:`making` was used.
    """

    answer: CallResult | None = None

    def __init__(self, observers: Sequence[CallObserver]) -> None:
        self._observers = observers
        self.channel = next((each.channel for each in observers if each.channel), None)
        self._is_finished = False
        self._is_sent = False
        self._texts: list[str] = []
        self._closes: list[Callable[[], Awaitable[None]]] = []
        self.headers = {name: value for each in observers for name, value in each.headers.items()}
        offers = [observer for observer in observers if observer.prompt_stream_id is not None]
        self.prompt_stream_id = offers[-1].prompt_stream_id if offers else None
        for observer in reversed(offers[:-1]):
            observer.release_stream()

    @property
    def usage(self) -> PromptUsage | None:
        """The token usage, once the engine has reported it."""
        return self.answer.usage if self.answer is not None else None

    def making(self) -> AbstractContextManager[None]:
        """Attribute the requests of this context to the call; see :func:`current_call`."""
        return setting(_current, self)

    async def items(self, stream: AsyncIterator[Item]) -> AsyncGenerator[Item]:
        """Yield the items of a stream, each made within :meth:`making`; then close the answer.

        The reader may make other calls between two items, so each item needs its own context.
        Frameworks that leave a stream early do not close the answer.
        """
        try:
            while True:
                with self.making():
                    try:
                        item = await anext(stream)
                    except StopAsyncIteration:
                        return
                yield item
        finally:
            for close in self._closes:
                await close()

    def attempt(self, _request: object, _body: Mapping[str, Any]) -> CallObserver:
        """Return an observer for the client's next attempt at the request."""
        return _CallAttempt(self)

    def send(self, body: Mapping[str, Any]) -> None:
        """Notify the observers of the body of the chat completion that is about to be sent."""
        is_first, self._is_sent = not self._is_sent, True
        for observer in self._observers if is_first else ():
            observer.on_prompt(body)

    def add_text(self, text: str) -> None:
        """Notify the observers of the next part of the answer's text."""
        self._texts.append(text)
        for observer in self._observers:
            observer.on_text(text)

    def finish(self, result: CallResult) -> None:
        """Notify the observers that the answer is complete."""
        self._is_finished = True
        for observer in self._observers:
            observer.on_finish(result)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._is_finished:
            for observer in self._observers:
                observer.on_failure(error or RuntimeError("the answer was not read to its end"))


_current: ContextVar[ObservedCall | None] = ContextVar("flashmoa_call", default=None)


def current_call() -> ObservedCall | None:
    """Return the call that makes the requests of this context."""
    return _current.get()


def current_attempts() -> Callable[[object, Mapping[str, Any]], CallObserver] | None:
    """Return a function that finds a request's observer in this context; ``None`` outside calls."""
    call = _current.get()
    return call.attempt if call is not None else None


class _CallAttempt(CallObserver):
    """Passes one attempt at the request of a call on to the call's observers.

    It passes on the text after the text of earlier attempts, unless this attempt's text differs.
    """

    def __init__(self, call: ObservedCall) -> None:
        super().__init__()
        self.prompt_stream_id = call.prompt_stream_id
        self.headers = call.headers
        self.channel = call.channel
        self._call = call
        self._known = "".join(call._texts)
        self._place: int | None = 0

    def on_prompt(self, body: Mapping[str, Any]) -> None:
        self._call.send(body)

    def on_response(self, close: Callable[[], Awaitable[None]]) -> None:
        self._call._closes.append(close)

    def on_named(self, call_id: str) -> None:
        for observer in self._call._observers:
            observer.on_named(call_id)

    def on_text(self, text: str) -> None:
        if self._place is None:
            return
        known = self._known[self._place : self._place + len(text)]
        self._place = self._place + len(text) if text.startswith(known) else None
        if self._place is not None and (new := text[len(known) :]):
            self._call.add_text(new)

    def on_finish(self, result: CallResult) -> None:
        self._call.answer = result


class OutputLengths:
    """Expects the length of an agent's next answer, in tokens, from its last answers."""

    def __init__(self) -> None:
        self._lengths = Recent[str, tuple[int, ...]]()

    def add(self, agent: str, tokens: int) -> None:
        # Older answers say little about the next one.
        self._lengths[agent] = (*self._lengths.get(agent, ()), tokens)[-8:]

    def keep(self, agents: Collection[str]) -> None:
        """Forget the answers of all agents but these."""
        for agent in self._lengths.keys() - agents:
            del self._lengths[agent]

    def kept(self) -> dict[str, tuple[int, ...]]:
        return dict(self._lengths)

    def restore(self, kept: Mapping[str, tuple[int, ...]]) -> None:
        """Know the lengths that :meth:`kept` returned, in another process."""
        for agent, lengths in kept.items():
            self._lengths[agent] = lengths[-8:]

    def expect(self, agent: str) -> int | None:
        """Return the median of the last lengths; ``None`` for an agent that has not answered."""
        lengths = self._lengths.get(agent)
        return round(median(lengths)) if lengths else None

    def headers(self, agent: str) -> dict[str, str]:
        """Return the headers that tell an engine the likely length of an agent's next answer.

        Engines with the plugin may put short jobs first (FlashAgents §6.6).
        """
        expected = self.expect(agent)
        return {} if expected is None else {TOKENS_HEADER: str(expected)}
