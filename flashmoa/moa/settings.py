"""Define settings: limits, quorum, steps, and sampling parameters."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.dataclasses import dataclass as validated

Order = Literal["contiguous", "prefix-cached"]
# Asks an engine to count tokens while it writes: each event of a stream has the usage so far.
RUNNING_USAGE = {"stream_options": {"continuous_usage_stats": True}}
# Makes unknown arguments of a pydantic dataclass errors.
NO_OTHERS = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
Count = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0)]


@validated(config=NO_OTHERS, frozen=True, slots=True)
class Limits:
    """How long an agent may take, and how often its request is sent. Times are in seconds.

    Attributes:
        first_token_seconds: from the request to the first token, waiting in the engine included.
        stall_seconds: between two tokens.
        answer_seconds: for the whole answer, all its requests together. After this time the answer
            ends, as if it had reached its ``max_tokens``.
        attempts: how many requests may be sent, to the model's engines in turn; ``None``: one to
            each engine. An answer that broke off is continued, not begun again.

    ``None`` for a time is no limit. Raises: ValueError if a number is not positive.
    """

    first_token_seconds: _Seconds | None = 120.0
    stall_seconds: _Seconds | None = 60.0
    answer_seconds: _Seconds | None = None
    attempts: Count | None = None


@validated(config=NO_OTHERS, frozen=True, slots=True)
class Quorum:
    """How many answers suffice after some time.

    Once ``seconds`` have passed since the first request to agents that are read together, and
    ``answers`` of them are complete, the others are left out.

    Raises: ValueError if a number is out of its range.
    """

    answers: Count
    seconds: Annotated[float, Field(ge=0)]


@validated(config=NO_OTHERS, frozen=True, slots=True)
class Steps:
    """The settings of a staircase: how long chunks are, and how they stand in the prompt.

    Attributes:
        first: number of tokens of the first chunk (8 in the paper). The engine counts them while it
            writes. On a server that does not, a chunk has this number of streamed deltas, each of
            one token or more.
        growth, largest: each later chunk has ``growth`` times the tokens of the previous chunk, at
            most ``largest``. The paper does not give them.
        order: the order of chunks in the prompt. ``contiguous``, the paper's main form: each text
            in one piece, so a large part of the prompt moves in every round. ``prefix-cached``, the
            paper's variant with prefix caching: each round's chunks after all earlier chunks, so
            only the aggregator's answer moves, which follows them.

    Raises: ValueError if a number is out of its range.
    """

    first: Count = 8
    growth: Annotated[float, Field(ge=1)] = 2.0
    largest: int = 128
    order: Order = "prefix-cached"

    def __post_init__(self) -> None:
        if self.largest < self.first:
            raise ValueError(
                f"largest is {self.largest}; it must be at least first, which is {self.first}"
            )

    def sizes(self) -> Generator[int]:
        """Yield the length of each chunk in tokens, without end."""
        size = float(self.first)
        while True:
            yield int(size)
            size = min(float(self.largest), size * self.growth)


# The two names of the parameter that limits an answer's tokens.
TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")
Penalty = Annotated[float, Field(ge=-2, le=2)]
Strings = str | list[str]


class ResponseFormat(BaseModel):
    """The form that an answer must have, as in OpenAI's API; the engine reads the other fields."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]


class Sampling(BaseModel):
    """Holds the parameters of chat completions that an engine gets unchanged.

    They are OpenAI's and SGLang's own. Engines ignore unknown names, so an unknown name is an error
    here.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Strings | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: Strings | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = None
    ebnf: str | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    verbosity: str | None = None

    def given_parameters(self) -> dict[str, Any]:
        """Return the parameters that are set; the two names of ``max_tokens`` become one.

        If both are set, the smaller number satisfies both.
        """
        given = self.model_dump(include=set(Sampling.model_fields), exclude_none=True)
        limits = [given.pop(name) for name in TOKEN_LIMITS if name in given]
        return {**given, "max_tokens": min(limits)} if limits else given


def suggest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the end of an error message: the known name nearest to an unknown name.

    Args:
        otherwise: the end if no name is near; by default it lists the names.
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise or f"use one of {', '.join(names)}"


# Parameters that an engine may refuse though their types are right.
_REFUSABLE = (
    "max_tokens", "max_completion_tokens", "min_tokens", "logit_bias", "stop_regex", "regex",
    "ebnf", "response_format", "chat_template_kwargs", "reasoning_effort", "tools", "tool_choice",
)  # fmt: skip

# One request must follow these parameters to the answer's end.
_OF_ONE_REQUEST = (
    "response_format", "regex", "ebnf", "json_schema", "tools",
    "stop_regex", "stop_token_ids", "no_stop_trim", "min_tokens",
)  # fmt: skip


def can_be_refused(parameters: Mapping[str, Any]) -> bool:
    """Return whether there is a parameter that an engine may refuse."""
    return any(parameters.get(name) is not None for name in _REFUSABLE)


def token_limit(parameters: Mapping[str, Any]) -> int | None:
    """Return how many tokens an answer may have; ``None`` for any number."""
    return parameters.get("max_completion_tokens") or parameters.get("max_tokens")


def needs_one_request(parameters: Mapping[str, Any]) -> list[str]:
    """Return the names of parameters that force one request to write the whole answer.

    A request that continues an answer applies its grammar and its ``min_tokens`` from its own first
    token on, and does not know that the answer has ended at a token. A tool must be called once all
    answers are read.
    """
    values = {name: parameters.get(name) for name in _OF_ONE_REQUEST}
    values["tools"] = may_call_tools(parameters)
    return [name for name, value in values.items() if value and value != {"type": "text"}]


def may_call_tools(parameters: Mapping[str, Any]) -> bool:
    """Return whether a request's answer may be a call of a tool."""
    return bool(parameters.get("tools")) and parameters.get("tool_choice") != "none"


def has_grammar(parameters: Mapping[str, Any]) -> bool:
    """Return whether a request's answer must match a grammar, such as JSON's."""
    form: dict[str, Any] = parameters.get("response_format") or {}
    names = ("regex", "ebnf", "json_schema")
    return form.get("type", "text") != "text" or any(parameters.get(name) for name in names)
