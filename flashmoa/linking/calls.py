"""Notify observers (:class:`CallObserver`) of one request of a model client, and remember how long
answers have been (:class:`OutputLengths`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Self

from flashmoa.completions import WatchedBody
from flashmoa.engine import PromptUsage
from flashmoa.observe.calls import CallReporter

# Older answers of an agent say little about its next one.
_REMEMBERED_LENGTHS = 8


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A request that is about to be sent.

    Attributes:
        engine: the URL of its engine.
        model: the model name in the request.
        hold_reason: why other agents do not get its text as it arrives; ``None`` if they do.
    """

    engine: str
    model: str
    hold_reason: str | None


@dataclass(frozen=True, slots=True)
class CallResult:
    """A complete answer.

    Attributes:
        text: the text that the framework made of it; may be empty.
        usage: the token usage that the engine reported, if it did.
        finish_reason: OpenAI's ``finish_reason``.
        is_forwarded: whether other agents get exactly this text; they do not if the answer is a
            tool call, or is rewritten.
        tool_calls: an answer that calls tools, as the framework's planner wants it; ``None`` if it
            calls none, or its planner does not ask.
    """

    text: str
    usage: PromptUsage | None
    finish_reason: str | None
    is_forwarded: bool
    tool_calls: object = None


class CallObserver:
    """Hears one request of a model client; by itself, it only passes what it hears to a report.

    Args:
        report: reports the request to a listener.

    Attributes:
        prompt_stream_id: the id of the prompt stream that it offers to the request, if any.
        expected_output_tokens: how long the answer is likely to be, if that is known. Engines with
            the plugin may put short jobs first (FlashAgents §6.6); others ignore it.
    """

    prompt_stream_id: str | None = None
    expected_output_tokens: int | None = None
    report: CallReporter | None = None

    def __init__(self, report: CallReporter | None = None) -> None:
        self.report = report

    def on_prompt(self, body: Mapping[str, Any]) -> None:
        """Receive the body of the chat completion, as it is about to be sent."""
        if self.report is not None:
            self.report.prompt_sent(body)

    def on_text(self, text: str) -> None:
        """Receive the next piece of the answer's text."""
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


class LinkedTeam(ABC):
    """A linked team. Its clients ask it to observe each of their requests."""

    @abstractmethod
    def observe(self, request: CallRequest) -> CallObserver | None:
        """Return an observer of a request; ``None`` if the request is not made by this team."""

    @abstractmethod
    async def close(self) -> None:
        """End every link of the team."""


class ObservedCall:
    """A context manager around one request, which notifies the request's observers.

    If it is left without :meth:`finish`, it notifies them of a failure.

    Args:
        hold_reason: see :class:`CallRequest`.

    Attributes:
        prompt_stream_id: the id of the prompt stream that the request is to use, if any. If several
            observers offer one, the last one's is used, and the others release theirs.
    """

    def __init__(self, observers: Sequence[CallObserver], hold_reason: str | None) -> None:
        self._observers = observers
        self._hold_reason = hold_reason
        self._finished = False
        self._body: WatchedBody | None = None
        offers = [observer for observer in observers if observer.prompt_stream_id is not None]
        self.prompt_stream_id = offers[-1].prompt_stream_id if offers else None
        for observer in reversed(offers[:-1]):
            observer.release_stream()

    @property
    def usage(self) -> PromptUsage | None:
        """The token usage that the engine has reported; ``None`` until it has."""
        return self._body.usage if self._body is not None else None

    def body(self, extra_body: Mapping[str, Any]) -> WatchedBody:
        """Return the request's ``extra_body``, which names its prompt stream and is watched.

        Args:
            extra_body: the fields that the caller has set.
        """
        body = dict(extra_body)
        if self.prompt_stream_id is not None:
            body["prompt_stream_id"] = self.prompt_stream_id
        for observer in self._observers:
            if observer.expected_output_tokens is not None:
                body.setdefault("expected_output_tokens", observer.expected_output_tokens)
        # An answer that is held back may be a tool call, and servers may format tool calls in a
        # stream in another way.
        taps = bool(self._observers) and self._hold_reason is None
        self._body = WatchedBody(body, self._on_text, on_request=self.report_prompt, taps=taps)
        return self._body

    def report_prompt(self, body: Mapping[str, Any]) -> None:
        """Notify the observers of the body of the chat completion that is about to be sent."""
        for observer in self._observers:
            observer.on_prompt(body)

    def finish(self, result: CallResult) -> None:
        """Notify the observers that the answer is complete."""
        self._finished = True
        for observer in self._observers:
            observer.on_finish(result)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._finished:
            for observer in self._observers:
                observer.on_failure(error or RuntimeError("the answer was not read to its end"))

    def _on_text(self, text: str) -> None:
        for observer in self._observers:
            observer.on_text(text)


class OutputLengths:
    """The lengths of the agents' last answers in tokens, from which the next one is expected."""

    def __init__(self) -> None:
        self._lengths: defaultdict[str, deque[int]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED_LENGTHS)
        )

    def add(self, agent: str, tokens: int) -> None:
        self._lengths[agent].append(tokens)

    def expect(self, agent: str) -> int | None:
        """Return the median of the last answers; ``None`` for an agent that has not answered."""
        lengths = self._lengths.get(agent)
        return round(median(lengths)) if lengths else None
