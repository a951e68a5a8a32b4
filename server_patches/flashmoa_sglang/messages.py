"""What the HTTP process and the scheduler processes say to each other beside requests.

Prefill itself travels as ordinary SGLang requests (tensor parallelism, chunking, metrics and
abort then work as for any request), marked through ``sampling_params.custom_params``, which
SGLang carries to the scheduler untouched. These messages are for control only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

CUSTOM_PARAMS_KEY = "flashmoa"


@dataclass(frozen=True, slots=True)
class RequestMark:
    """Why the plugin sent, or touched, a request.

    ``stream``: the prompt stream it belongs to, if any. ``final``: it is the real request
    that uses the stream, not an increment of it; ``late``: how many tokens it has to compute.
    ``expected_output``: how many tokens its client expects it to decode, if it said.
    """

    stream: str | None = None
    final: bool = False
    late: int = 0
    expected_output: int | None = None

    def to_custom_params(self) -> dict[str, Any]:
        return {CUSTOM_PARAMS_KEY: asdict(self)}


def mark_of(custom_params: Any) -> RequestMark | None:
    """The mark in a request's ``custom_params``; users may put anything else there."""
    if not isinstance(custom_params, dict):
        return None
    fields = custom_params.get(CUSTOM_PARAMS_KEY)
    if not isinstance(fields, dict):
        return None
    stream, late = fields.get("stream"), fields.get("late")
    if not isinstance(stream, str | None):
        return None
    expected = fields.get("expected_output")
    return RequestMark(
        stream,
        bool(fields.get("final")),
        late if isinstance(late, int) else 0,
        expected if isinstance(expected, int) else None,
    )


@dataclass(frozen=True, slots=True)
class ReleaseStream:
    """To every scheduler: the stream is over, give its KV back to the cache."""

    stream: str


@dataclass(frozen=True, slots=True)
class KvQuery:
    """To every scheduler: report how the KV pool stands."""

    query: int


@dataclass(frozen=True, slots=True)
class KvReport:
    """From one rank per data-parallel group; in tokens, but for ``pinned_streams``."""

    query: int
    dp_rank: int
    total: int
    free: int
    evictable: int
    protected: int
    pinned_streams: int
