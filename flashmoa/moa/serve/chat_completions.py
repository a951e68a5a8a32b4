"""Read the bodies of chat completions (``ChatQuestion``), and make the bodies of answers; pure.

Nothing in a request is ignored: every field is used, passed on to the agent that writes the answer,
or refused with a sentence that says why.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flashmoa import FlashMoAError
from flashmoa.engine import PromptUsage
from flashmoa.errors import RequestRefused
from flashmoa.moa.prompts import Messages
from flashmoa.moa.results import AgentAnswer, MixtureFailed, Result
from flashmoa.moa.settings import Sampling, suggest

# Fields for an OpenAI account. They change no answer; the engine may use them.
_ACCOUNT_FIELDS = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "user")
# Fields that only the agent that writes the answer gets; without tools they mean nothing.
_TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
_OLD_TOOLS = "it is the older form of tools; give tools and tool_choice"
# Fields that no answer can follow: the values that ask for nothing, and why others are refused.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "a question gets one answer; send it again for another"),
    "best_of": ((1,), "a question gets one answer"),
    "logprobs": ((False,), "answers come without log-probabilities; leave it out"),
    "top_logprobs": ((0,), "answers come without log-probabilities; leave it out"),
    "echo": ((False,), "the question is not repeated; leave it out"),
    "store": ((False,), "nothing is stored here; leave it out"),
    "modalities": ((["text"],), "agents write text; leave it out"),
    "audio": ((), "agents write text; leave it out"),
    "prediction": ((), "answers cannot be predicted; leave it out"),
    "web_search_options": ((), "agents cannot search the web; leave it out"),
    "functions": (([],), _OLD_TOOLS),
    "function_call": (("none", "auto"), _OLD_TOOLS),
}


class ChatRequestRefused(FlashMoAError):
    """Raised when a request is not answered; carries the fields of OpenAI's error object."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True)
class ChatQuestion:
    """A question, and how to answer it.

    Attributes:
        messages: the conversation; contents are strings, and the last message is a user's or a
            tool's.
        model: the name of the model; ``None`` if the body has none.
        includes_usage: whether the stream ends with the usage.
        parameters: what the agent that writes the answer gets in place of its own sampling, and its
            tools.
        shows_answers: whether the answer's record has the texts of all agents; ``None``: as the
            file says.
    """

    messages: Messages
    model: str | None
    streams: bool
    includes_usage: bool
    parameters: dict[str, Any]
    shows_answers: bool | None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ChatQuestion:
        """Read a body. Raises: ChatRequestRefused, which names the field."""
        given = {name: value for name, value in body.items() if value is not None}
        for name, (neutral, reason) in _UNSUPPORTED.items():
            if name in given and given.pop(name) not in neutral:
                refuse(f"{name} is {_shown(body[name])}: {reason}", name, "unsupported_parameter")
        try:
            fields = _Body.model_validate(given)
        except ValidationError as error:
            _refuse_invalid(error)
        options = fields.stream_options
        if options is not None and not fields.stream:
            refuse("stream_options needs stream: true; send it, too", "stream_options")
        role = fields.messages[-1].role
        if role not in ("user", "tool"):
            advice = "agents answer a user's or a tool's message, so end the conversation with one"
            refuse(f"the last message has role {role!r}; {advice}", "messages")
        if not fields.tools and fields.tool_choice not in (None, "none", "auto"):
            refuse("tool_choice demands a tool, and there are no tools; give tools", "tool_choice")
        passed_on = (*_ACCOUNT_FIELDS, *(_TOOL_FIELDS if fields.tools else ()))
        parameters = {name: given[name] for name in passed_on if name in given}
        return cls(
            [_read_message(message, place) for place, message in enumerate(given["messages"])],
            fields.model,
            bool(fields.stream),
            bool(options and options.include_usage),
            {**fields.given_parameters(), **parameters},
            fields.flashmoa.show_answers if fields.flashmoa is not None else None,
        )


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _OwnOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    show_answers: bool | None = None


class _Named(BaseModel):
    """A function, or a tool of one's own, with the fields that members read."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str
    description: str | None = None


class _Tool(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    function: _Named | None = None
    custom: _Named | None = None

    @model_validator(mode="after")
    def _has_name(self) -> Self:
        if self.function is None and self.custom is None:
            raise ValueError("it names no function; give it a function with a name")
        return self


class _ToolCall(_Tool):
    id: str | None = None


class _Message(BaseModel):
    # Templates read further fields of some models, such as reasoning_content.
    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class _Body(Sampling):
    messages: list[_Message] = Field(min_length=1)
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    flashmoa: _OwnOptions | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None


def refuse(message: str, param: str | None = None, code: str | None = None) -> NoReturn:
    """Raise ChatRequestRefused."""
    raise ChatRequestRefused(message, param=param, code=code)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def parse_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a request. Raises: ChatRequestRefused if there is none."""
    try:
        body: object = json.loads(content, parse_constant=_refuse_constant)
        # JSON may contain half a surrogate pair, or a number that is too large for a float; an
        # engine's request cannot.
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        if isinstance(body, dict):
            return body  # pyright: ignore[reportUnknownVariableType]
        problem = f"it is a JSON {type(body).__name__}"
    refuse(f"the body is not a JSON object ({problem}); send an object with a question")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _refuse_invalid(error: ValidationError) -> NoReturn:
    """Refuse a body for the first of its problems."""
    problem = error.errors(include_url=False)[0]
    path = [str(part) for part in problem["loc"]]
    name = path[0]
    if problem["type"] == "extra_forbidden":
        options = {"stream_options": _StreamOptions, "flashmoa": _OwnOptions}
        known = (options[name] if len(path) > 1 else _Body).model_fields
        advice = suggest(path[-1], known)
        refuse(f"there is no field {'.'.join(path)!r}: {advice}", name, "unknown_parameter")
    if problem["type"] == "missing" and path == ["messages"]:
        refuse("messages is missing; send an object with messages", name)
    # Further parts of a content's path are its possible types.
    where = ".".join(path[:3] if path[2:3] == ["content"] else path)
    shown = "" if problem["type"] == "missing" else f" is {_shown(problem['input'])}"
    refuse(f"{where}{shown}: {problem['msg'].removeprefix('Value error, ')}", name)


def _read_message(message: dict[str, Any], place: int) -> dict[str, Any]:
    """Return a message whose content is a string, with a role that chat templates know."""
    role = "system" if message["role"] == "developer" else message["role"]
    content: str | list[dict[str, Any]] | None = message.get("content")
    if content is None:
        if not (role == "assistant" and message.get("tool_calls")):
            refuse(f"messages.{place} has no content; give it a text", "messages")
        content = ""
    if isinstance(content, list):
        where = f"messages.{place}.content"
        content = "\n".join(_read_part(part, f"{where}.{n}") for n, part in enumerate(content))
    return {**message, "role": role, "content": content}


def _read_part(part: Mapping[str, Any], where: str) -> str:
    """Return the text of a content part."""
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        advice = "agents read each other's texts, so a question has text only; leave the part out"
        refuse(f"{where} has type {_shown(kind)}: {advice}", "messages", "unsupported_content")
    if not isinstance(text := part.get(kind), str):
        refuse(f"{where} has no {kind}; give it one", "messages")
    return text


@dataclass(frozen=True, slots=True)
class Completion:
    """Makes an answer's bodies. A streamed answer has the same id and time in all chunks."""

    model: str
    has_usage: bool
    identity: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, result: Result, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a whole answer. ``record`` is the one of :func:`describe_agents`."""
        content = result.text if result.text or not result.tool_calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if result.tool_calls:
            message["tool_calls"] = [*result.tool_calls]
        choice = {"message": message, "finish_reason": result.finish_reason or "stop"}
        return {
            **self._head("chat.completion"),
            "choices": [{"index": 0, **choice, "logprobs": None}],
            "usage": count(result.final.usage),
            "flashmoa": record,
        }

    def begin(self) -> list[dict[str, Any]]:
        """Return the chunks before a streamed answer."""
        return [self._chunk({"role": "assistant", "content": ""})]

    def add(self, piece: str) -> list[dict[str, Any]]:
        """Return the chunks of the next piece of the text."""
        return [self._chunk({"content": piece})]

    def end(self, result: Result, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the chunks after the text: the calls, the finish reason, and the usage."""
        calls = [{"index": number, **call} for number, call in enumerate(result.tool_calls)]
        chunks = [self._chunk({"tool_calls": [call]}) for call in calls]
        chunks.append({**self._chunk({}, result.finish_reason or "stop"), "flashmoa": record})
        if self.has_usage:
            head = self._head("chat.completion.chunk")
            chunks.append({**head, "choices": [], "usage": count(result.final.usage)})
        return chunks

    def fail(self, error: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of an answer that fails."""
        return [error]

    def _chunk(self, delta: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.identity, "object": kind, "created": self.created, "model": self.model
        }  # fmt: skip


def count(usage: PromptUsage | None) -> dict[str, Any]:
    """Return a usage in the form of chat completions."""
    usage = usage or PromptUsage(prompt_tokens=0, completion_tokens=0)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
    }


def describe_agents(
    result: Result, engines: Mapping[str, str], *, shows_answers: bool
) -> dict[str, Any]:
    """Return the records of all agents, and the question's cost.

    Args:
        engines: see :func:`without_urls`.
        shows_answers: whether the records have the agents' texts.
    """
    substitution = None if result.substitution is None else asdict(result.substitution)
    if substitution is not None:
        substitution["problem"] = without_urls(substitution["problem"], engines)
    return {
        **asdict(result.spending),
        "in_one_request_for": [*result.in_one_request_for],
        "substitution": substitution,
        "agents": [_describe_agent(agent, engines, shows_answers) for agent in result.agents],
    }


def without_urls(text: str, engines: Mapping[str, str]) -> str:
    """Return a text with names in place of engines' URLs, which clients must not see.

    Args: engines: the name of each URL.
    """
    for url, name in engines.items():
        # One URL may be the beginning of another, with a longer port or host.
        text = re.sub(rf"{re.escape(url)}(?![\w-]|[.:]\w)", lambda _, name=name: name, text)
    return text


def _describe_agent(
    agent: AgentAnswer, engines: Mapping[str, str], shows_answer: bool
) -> dict[str, Any]:
    usage = None if agent.usage is None else count(agent.usage)
    seconds = None
    if agent.started is not None and agent.finished is not None:
        seconds = agent.finished - agent.started
    names = ("name", "layer", "place", "model", "status", "cut_tokens")
    return {
        **{name: getattr(agent, name) for name in names},
        "problem": without_urls(agent.problem, engines),
        "retries": [without_urls(retry, engines) for retry in agent.retries],
        "usage": usage,
        "seconds": seconds,
        **({"text": agent.text} if shows_answer else {}),
    }


def error_body(
    error: Exception, engines: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body, in the form of OpenAI's API, that report an error.

    Args: engines: see :func:`without_urls`.
    """
    param = code = None
    if isinstance(error, ChatRequestRefused):
        status, param, code = error.status, error.param, error.code
    elif isinstance(error, MixtureFailed):
        status = _status_of_failure(error)
    else:
        status = 500
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 429:  # LiteLLM does not repeat a request that was invalid.
        kind = "requests"
    message = without_urls(str(error), engines or {}) or type(error).__name__
    return status, {
        "error": {"message": message, "type": kind, "param": param, "code": code or str(status)}
    }


def _status_of_failure(error: BaseException) -> int:
    """Return 400 if an engine refused the client's input in an agent's request, else 502."""
    causes: Sequence[BaseException | None] = (error.__cause__, error.__context__)
    refusals = [cause for cause in causes if isinstance(cause, RequestRefused)]
    return 400 if any(refusal.blames_request for refusal in refusals) else 502
