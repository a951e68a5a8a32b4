"""One request of a model client, and everyone who hears of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from flashmoa.completions import WatchedBody
from flashmoa.engine import PromptUsage
from flashmoa.observe.calls import CallReporter


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A request that is about to go out.

    Attributes:
        engine: its engine's URL.
        model: as the request names it.
        held: why other agents do not get its text as it arrives; ``None`` if they do.
    """

    engine: str
    model: str
    held: str | None


@dataclass(frozen=True, slots=True)
class CallResult:
    """A complete answer.

    Attributes:
        text: what the framework made of it; empty where there is none.
        usage: as the engine says.
        finish_reason: as OpenAI has it.
        is_forwarded: whether other agents get this very text; not where it is a call of tools, or
            is rewritten.
    """

    text: str
    usage: PromptUsage | None
    finish_reason: str | None
    is_forwarded: bool


class CallObserver:
    """Base of everything that hears of one request; it ignores all of it.

    Attributes:
        prompt_stream_id: the prompt stream that it offers the request, if it has one.
    """

    prompt_stream_id: str | None = None

    def on_text(self, text: str) -> None:
        """Take the next piece of the answer."""

    def on_finish(self, result: CallResult) -> None:
        """Take the complete answer."""

    def on_failure(self, error: BaseException) -> None:
        """Note that there will be no answer."""

    def release_stream(self) -> None:
        """Release the prompt stream: the request uses another one, or was never sent."""


class LinkedTeam(ABC):
    """A team or workflow that is linked; its clients tell it of each of their requests."""

    @abstractmethod
    def observe(self, request: CallRequest) -> CallObserver | None:
        """Return who hears of a request that is about to go out; ``None`` if the request is not
        of this team."""

    @abstractmethod
    async def close(self) -> None:
        """End every link of the team."""


class ReportedCall(CallObserver):
    """Tells a listener of a request that no linked team tells of."""

    def __init__(self, report: CallReporter) -> None:
        self._report = report

    def on_text(self, text: str) -> None:
        self._report.text_arrived()

    def on_finish(self, result: CallResult) -> None:
        self._report.finished(result.text, result.usage, result.finish_reason)

    def on_failure(self, error: BaseException) -> None:
        self._report.failed(error)


class ObservedCall:
    """A context manager around one request, which tells its observers how it ends on every path.

    Args:
        held: see :class:`CallRequest`.

    Attributes:
        prompt_stream_id: the prompt stream that the request is to use, if any. Where several
            observers offer one, the last one's is used; the others are told to release theirs.
    """

    def __init__(self, observers: Sequence[CallObserver], held: str | None) -> None:
        self._observers = observers
        self._held = held
        self._finished = False
        self._body: WatchedBody | None = None
        offering = [one for one in observers if one.prompt_stream_id is not None]
        self.prompt_stream_id = offering[-1].prompt_stream_id if offering else None
        for one in reversed(offering[:-1]):
            one.release_stream()

    @property
    def usage(self) -> PromptUsage | None:
        """What the engine has said of the request's tokens so far."""
        return self._body.usage if self._body is not None else None

    def body(self, given: Mapping[str, Any]) -> WatchedBody:
        """Return the request's ``extra_body``: with its prompt stream, and watched."""
        body = dict(given)
        if self.prompt_stream_id is not None:
            body["prompt_stream_id"] = self.prompt_stream_id
        # A held answer may be a call of tools, which a server may put otherwise in a stream.
        taps = bool(self._observers) and self._held is None
        self._body = WatchedBody(body, self._on_text, taps=taps)
        return self._body

    def finish(self, result: CallResult) -> None:
        """Tell the observers that the answer is complete."""
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
