"""The calls of a run as rows of a table."""

from __future__ import annotations

from flashmoa.observe.calls import Call
from flashmoa.observe.events import CallFailed
from flashmoa.observe.overlap import Overlap
from flashmoa.observe.summary import seconds

COLUMNS = (
    "agent",
    "prompt",
    "cached",
    "streamed",
    "late",
    "written",
    "ahead",
    "first token",
    "link",
)
"""Tokens, but for ``ahead`` (see ``Overlap``) and ``first token``: times."""


def row(call: Call, overlap: Overlap | None) -> list[str]:
    """One cell per column; empty where the engine does not say."""
    usage = call.usage
    numbers = (
        (
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.streamed_tokens,
            usage.late_tokens,
            usage.completion_tokens,
        )
        if usage is not None
        else (None,) * 5
    )
    ahead = seconds(overlap.ahead) if overlap is not None else ""
    tokens = ["" if number is None else str(number) for number in numbers]
    return [call.agent, *tokens, ahead, _first_token(call), link_status(call)]


def link_status(call: Call) -> str:
    """``hit``, ``mispredicted``, ``late``, why its stream was not there, or nothing."""
    if call.usage is not None and call.usage.prompt_stream is not None:
        return call.usage.prompt_stream.status
    return "late" if call.started.late else ""


def _first_token(call: Call) -> str:
    waited = seconds(call.first_token - call.started.at) if call.first_token is not None else ""
    state = "failed" if isinstance(call.ended, CallFailed) else ""
    if call.ended is None:
        state = "not ended"
    return ", ".join(part for part in (waited, state) if part)
