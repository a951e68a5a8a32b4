"""Make the bodies of chat completions: answers, streamed chunks, usage and errors; pure."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flashmoa.engine import PromptUsage, RequestRefused
from flashmoa.moa.results import AgentAnswer, MixtureFailed, Result
from flashmoa.moa.serve.chat_requests import ChatRequestRefused

_AGENT_FIELDS = ("name", "layer", "place", "model", "status", "cut_tokens")


@dataclass(frozen=True, slots=True)
class Completion:
    """Makes the bodies of one answer.

    Attributes:
        model: the name of the model that was asked.
        engines: see :func:`without_urls`.
        identity, created: the same in all chunks of a streamed answer.
    """

    model: str
    engines: Mapping[str, str]
    identity: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, result: Result) -> dict[str, Any]:
        """Return a whole answer."""
        message = {"role": "assistant", "content": result.text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": _reason(result)}
        return {
            **self._head("chat.completion"),
            "choices": [{**choice, "logprobs": None}],
            "usage": count_usage(result),
            "flashmoa": describe_agents(result, self.engines),
        }

    def chunk(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        """Return a chunk of a streamed answer."""
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def last_chunks(self, result: Result, *, has_usage: bool) -> list[dict[str, Any]]:
        """Return the chunks after the text: the finish reason, and the usage if asked for."""
        last = self.chunk({})
        last["choices"][0]["finish_reason"] = _reason(result)
        last["flashmoa"] = describe_agents(result, self.engines)
        if not has_usage:
            return [last]
        head = self._head("chat.completion.chunk")
        return [last, {**head, "choices": [], "usage": count_usage(result)}]

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.identity, "object": kind, "created": self.created, "model": self.model
        }  # fmt: skip


def _reason(result: Result) -> str:
    return result.finish_reason or "stop"


def count_usage(result: Result) -> dict[str, Any]:
    """Return the usage of the agent that wrote the answer, as OpenAI's API counts it."""
    usage = result.final.usage
    return _count(usage or PromptUsage(prompt_tokens=0, completion_tokens=0))


def _count(usage: PromptUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
    }


def describe_agents(result: Result, engines: Mapping[str, str]) -> dict[str, Any]:
    """Return what all agents did, and what the question has cost.

    Args: engines: see :func:`without_urls`.
    """
    substitution = None if result.substitution is None else asdict(result.substitution)
    if substitution is not None:
        substitution["problem"] = without_urls(substitution["problem"], engines)
    return {
        **asdict(result.spending),
        "in_one_request_for": [*result.in_one_request_for],
        "substitution": substitution,
        "agents": [_describe_agent(agent, engines) for agent in result.agents],
    }


def without_urls(text: str, engines: Mapping[str, str]) -> str:
    """Return a text with names in place of engines' URLs, which are no business of clients.

    Args: engines: the name of each URL.
    """
    for url, name in engines.items():
        # One URL may be the beginning of another: of another port or host.
        text = re.sub(rf"{re.escape(url)}(?![\w-]|[.:]\w)", lambda _, name=name: name, text)
    return text


def _describe_agent(agent: AgentAnswer, engines: Mapping[str, str]) -> dict[str, Any]:
    usage = None if agent.usage is None else _count(agent.usage)
    seconds = None
    if agent.started is not None and agent.finished is not None:
        seconds = agent.finished - agent.started
    fields = {name: getattr(agent, name) for name in _AGENT_FIELDS}
    fields["problem"] = without_urls(agent.problem, engines)
    fields["retries"] = [without_urls(retry, engines) for retry in agent.retries]
    return {**fields, "usage": usage, "seconds": seconds}


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
    if status == 429:  # LiteLLM would not try a request again that was invalid.
        kind = "requests"
    message = without_urls(str(error), engines or {}) or type(error).__name__
    return status, {
        "error": {"message": message, "type": kind, "param": param, "code": code or status}
    }


def _status_of_failure(error: BaseException) -> int:
    """Return 400 if an engine refused an agent's request for what the client sent, else 502."""
    causes: Sequence[BaseException | None] = (error.__cause__, error.__context__)
    refusals = [cause for cause in causes if isinstance(cause, RequestRefused)]
    return 400 if any(refusal.blames_request for refusal in refusals) else 502
