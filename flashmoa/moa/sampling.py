"""Check the sampling parameters of agents, in files and in clients' requests (``Sampling``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Tokens = Annotated[int, Field(ge=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Strings = str | list[str]


class ResponseFormat(BaseModel):
    """The form that an answer must have, as in OpenAI's API; the engine reads the other fields."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]


class Sampling(BaseModel):
    """Holds parameters of chat completions which an engine gets as they are.

    They are those of OpenAI's API and SGLang's own. Engines ignore names that they do not know, so
    an unknown name is an error here.
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
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
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
        """Return the parameters that are set, the two names of ``max_tokens`` as that one.

        If both are set, the smaller number satisfies both.
        """
        given = self.model_dump(include=set(Sampling.model_fields), exclude_none=True)
        names = ("max_tokens", "max_completion_tokens")
        limits = [given.pop(name) for name in names if name in given]
        return {**given, "max_tokens": min(limits)} if limits else given


def suggest(name: str, known: Iterable[str]) -> str:
    """Return an error message's end that names the known name nearest to an unknown one."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(names)}"


# Parameters for which an engine may refuse a request, though their types are right.
_REFUSABLE = (
    "max_tokens", "max_completion_tokens", "min_tokens", "logit_bias", "stop_regex", "regex",
    "ebnf", "response_format", "chat_template_kwargs", "reasoning_effort", "tools", "tool_choice",
)  # fmt: skip

# Parameters that one request must follow to the answer's end.
_OF_ONE_REQUEST = (
    "response_format", "regex", "ebnf", "json_schema",
    "stop_regex", "stop_token_ids", "no_stop_trim", "min_tokens",
)  # fmt: skip


def can_be_refused(parameters: Mapping[str, Any]) -> bool:
    """Return whether an engine may refuse a request because of these parameters."""
    return any(parameters.get(name) is not None for name in _REFUSABLE)


def token_limit(parameters: Mapping[str, Any]) -> int | None:
    """Return how many tokens an answer may have; ``None`` for any number."""
    return parameters.get("max_completion_tokens") or parameters.get("max_tokens")


def ends_at_text(parameters: Mapping[str, Any]) -> bool:
    """Return whether an answer ends at a given text or token."""
    return any(parameters.get(name) for name in ("stop", "stop_regex", "stop_token_ids"))


def needs_one_request(parameters: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters because of which one request must write the whole answer.

    A request that continues an answer applies its grammar and its ``min_tokens`` from its own first
    token on, and does not know that the answer has ended at a token.
    """
    values = {name: parameters.get(name) for name in _OF_ONE_REQUEST}
    return [name for name, value in values.items() if value and value != {"type": "text"}]


def has_grammar(parameters: Mapping[str, Any]) -> bool:
    """Return whether a request's answer must match a grammar, as that of JSON."""
    form: dict[str, Any] = parameters.get("response_format") or {}
    names = ("regex", "ebnf", "json_schema")
    return form.get("type", "text") != "text" or any(parameters.get(name) for name in names)
