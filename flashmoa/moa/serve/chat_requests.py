"""Read the bodies of chat completions (``ChatQuestion``); pure.

Nothing in a body is ignored: every field is used, passed on to the agent that writes the answer,
or refused with a sentence that says why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flashmoa import FlashMoAError
from flashmoa.moa.prompts import Messages
from flashmoa.moa.sampling import Sampling, suggest

# Fields for an account of OpenAI's. They change no answer; the engine may use them.
_ACCOUNT_FIELDS = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "user")
_NO_TOOLS = "agents pass on texts, not calls of tools; leave it out"
# Fields that no answer here can follow: the values that ask for nothing, and why others are
# refused.
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
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": ((True, False), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
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
        parameters: what the agent that writes the answer gets in place of its own sampling.
    """

    messages: Messages
    model: str | None
    streams: bool
    includes_usage: bool
    parameters: dict[str, Any]

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ChatQuestion:
        """Read a body. Raises: ChatRequestRefused, which names the field."""
        given = {name: value for name, value in body.items() if value is not None}
        for name, (neutral, reason) in _UNSUPPORTED.items():
            if name in given and given.pop(name) not in neutral:
                _refuse(f"{name} is {_shown(body[name])}: {reason}", name, "unsupported_parameter")
        try:
            fields = _Body.model_validate(given)
        except ValidationError as error:
            _refuse_invalid(error)
        options = fields.stream_options
        if options is not None and not fields.stream:
            _refuse("stream_options needs stream: true; send it, too", "stream_options")
        parameters = {name: given[name] for name in _ACCOUNT_FIELDS if name in given}
        return cls(
            [_read_message(message, place) for place, message in enumerate(_check(fields))],
            fields.model,
            bool(fields.stream),
            bool(options and options.include_usage),
            {**fields.given_parameters(), **parameters},
        )


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Message(BaseModel):
    # Templates read further fields of some models, such as reasoning_content.
    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Body(Sampling):
    messages: list[_Message] = Field(min_length=1)
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None


def _refuse(message: str, param: str | None = None, code: str | None = None) -> NoReturn:
    raise ChatRequestRefused(message, param=param, code=code)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def parse_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a request. Raises: ChatRequestRefused if there is none."""
    try:
        body: object = json.loads(content, parse_constant=_refuse_constant)
        # Half of a surrogate pair, or a number that is too large for a float: JSON can contain
        # them, and an engine's request cannot.
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        if isinstance(body, dict):
            return body  # pyright: ignore[reportUnknownVariableType]
        problem = f"it is a JSON {type(body).__name__}"
    _refuse(f"the body is not a chat completion request ({problem}); send an object with messages")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _refuse_invalid(error: ValidationError) -> NoReturn:
    """Refuse a body for the first of its problems."""
    problem = error.errors(include_url=False)[0]
    path = [str(part) for part in problem["loc"]]
    name = path[0]
    if problem["type"] == "extra_forbidden":
        known = _StreamOptions.model_fields if len(path) > 1 else {**_Body.model_fields}
        advice = suggest(path[-1], known)
        _refuse(f"there is no field {'.'.join(path)!r}: {advice}", name, "unknown_parameter")
    if problem["type"] == "missing" and name == "messages":
        _refuse("messages is missing; send an object with messages", name)
    where = ".".join(path[:3])
    shown = "" if problem["type"] == "missing" else f" is {_shown(problem['input'])}"
    _refuse(f"{where}{shown}: {problem['msg']}", name)


def _check(fields: _Body) -> list[dict[str, Any]]:
    """Return the messages. Raises: ChatRequestRefused if the last one does not ask anything."""
    last = fields.messages[-1]
    if last.role not in ("user", "tool"):
        _refuse(
            f"the last message has role {last.role!r}; agents answer a user's or a tool's message, "
            "so end the conversation with one",
            "messages",
        )
    return [message.model_dump(exclude_unset=True) for message in fields.messages]


def _read_message(message: dict[str, Any], place: int) -> dict[str, Any]:
    """Return a message whose content is a string, with a role that chat templates know."""
    role = "system" if message["role"] == "developer" else message["role"]
    content: str | list[dict[str, Any]] | None = message.get("content")
    if content is None:
        if not (role == "assistant" and message.get("tool_calls")):
            _refuse(f"messages.{place} has no content; give it a text", "messages")
        content = ""
    if isinstance(content, list):
        where = f"messages.{place}.content"
        content = "\n".join(_read_part(part, f"{where}.{n}") for n, part in enumerate(content))
    return {**message, "role": role, "content": content}


def _read_part(part: Mapping[str, Any], where: str) -> str:
    """Return the text of a content part."""
    kind = part.get("type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind in ("text", "refusal") and isinstance(text, str):
        return text
    if kind in ("text", "refusal"):
        _refuse(f"{where} has no {kind}; give it one", "messages")
    _refuse(
        f"{where} has type {_shown(kind)}: agents read each other's texts, so a question has text "
        "only; leave the part out",
        "messages",
        "unsupported_content",
    )
