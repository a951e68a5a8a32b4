"""What a model client and a linked team say to each other about one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from autogen_core.models import CreateResult, ModelFamily, ModelInfo, RequestUsage
from autogen_core.tools import Tool, ToolSchema
from pydantic import BaseModel

from flashmoa.completions import Watch, WatchedBody
from flashmoa.engine import PromptUsage
from flashmoa.observe.calls import CallReporter

JsonOutput = bool | type[BaseModel] | None


@dataclass
class EngineUsage(RequestUsage):
    """AutoGen's usage with what the engine says of the prompt, in tokens.

    ``prompt_tokens = cached_tokens + late_tokens``; of the cached, ``streamed_tokens`` were
    computed by the call's link before the call. ``None`` where the engine does not say.
    """

    cached_tokens: int | None = None
    streamed_tokens: int | None = None
    late_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One call's request. ``engine``: its URL; ``model``: as the request names it; ``held``: why
    others do not get its text as it comes, if so."""

    engine: str
    model: str
    held: str | None


class CallObserver(Protocol):
    """What a linked team does about one call of one of its agents."""

    prompt_stream_id: str | None

    def on_text(self, text: str) -> None: ...

    def on_finish(self, result: CreateResult, usage: PromptUsage | None, raw: bool) -> None:
        """``raw``: whether the text reaches other agents as it is."""
        ...

    def on_failure(self, error: BaseException) -> None: ...

    def give_back(self) -> None:
        """The request uses another prompt stream than this one's."""
        ...


class CallWatcher(Protocol):
    """A linked team; a client tells each of them about each call."""

    def begin(self, agent_type: str, agent_key: str, request: Request) -> CallObserver | None:
        """A request of this agent is about to go out; ``None`` if it is not the team's."""
        ...

    async def close(self) -> None: ...


class ReportedCall:
    """A call of no linked team (a ``CallObserver``), told of to its client's listener."""

    prompt_stream_id: str | None = None

    def __init__(self, report: CallReporter) -> None:
        self._report = report

    def on_text(self, text: str) -> None:
        self._report.text()

    def on_finish(self, result: CreateResult, usage: PromptUsage | None, raw: bool) -> None:
        text = result.content if isinstance(result.content, str) else ""
        self._report.finished(text, usage, result.finish_reason)

    def on_failure(self, error: BaseException) -> None:
        self._report.failed(error)

    def give_back(self) -> None:
        """It has no stream of its own."""


class Reporting:
    """Tells a call's observers how it ended, on every path."""

    def __init__(self, observers: list[CallObserver], watch: Watch, raw: bool) -> None:
        self._observers = observers
        self._watch = watch
        self._raw = raw
        self._finished = False

    def __enter__(self) -> Self:
        return self

    def __call__(self, result: CreateResult) -> CreateResult:
        usage = self._watch.usage
        if usage is not None and usage.cached_tokens is not None:
            result.usage = EngineUsage(
                prompt_tokens=result.usage.prompt_tokens,
                completion_tokens=result.usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                streamed_tokens=usage.streamed_tokens,
                late_tokens=usage.late_tokens,
            )
        self._finished = True
        for observer in self._observers:
            observer.on_finish(result, usage, self._raw)
        return result

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._finished:
            for observer in self._observers:
                observer.on_failure(error or RuntimeError("the answer was not read to its end"))


def held_back(
    tools: Sequence[Tool | ToolSchema], json_output: JsonOutput, model_info: ModelInfo
) -> str | None:
    """Why the answer's text does not reach other agents as it arrives, if so."""
    if tools:
        return "it has tools, so its answer may be a call"
    if is_structured(json_output):
        return "its answer is structured, and written anew"
    if model_info["family"] == ModelFamily.R1:
        return "its reasoning is taken out of its text"
    return None


def is_structured(json_output: JsonOutput) -> bool:
    """Whether AutoGen makes something else of the answer than its text."""
    return isinstance(json_output, type)


def heard_by(observers: Sequence[CallObserver], held: str | None) -> Callable[[str], None]:
    """What a call's text is given to as it arrives: all its observers, unless it is held."""

    def on_text(text: str) -> None:
        for observer in observers if held is None else ():
            observer.on_text(text)

    return on_text


def watched_args(
    configured: Mapping[str, Any],
    extra: Mapping[str, Any],
    observers: Sequence[CallObserver],
    watch: Watch,
) -> dict[str, Any]:
    """A call's extra arguments, with its prompt stream and its watch in their body.

    Args:
        configured: the client's own arguments.
        extra: those given with the call.
    """
    bodies: list[dict[str, Any]] = [one.get("extra_body") or {} for one in (configured, extra)]
    body = bodies[0] | bodies[1]
    offering = [one for one in observers if one.prompt_stream_id is not None]
    for number, observer in enumerate(reversed(offering)):
        if number == 0:
            body["prompt_stream_id"] = observer.prompt_stream_id
        else:
            observer.give_back()
    return {**extra, "extra_body": WatchedBody(body, watch)}
