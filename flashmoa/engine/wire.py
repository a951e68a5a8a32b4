"""The plugin's answers as types; ``docs/engine-api.md`` describes the routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict


class _Answer(BaseModel):
    # An engine may be newer than this client.
    model_config = ConfigDict(extra="ignore", frozen=True)


class ExpertMemory(_Answer):
    """Where the experts of one rank's model are, in bytes; ``layers`` with experts, of which the
    device holds the first one's and ``slots``. ``share``: what this replica holds of the others',
    ``at_peers``: the rest of them. ``misses``: experts that were waited for."""

    layers: int
    slots: int
    resident: int
    in_slots: int
    on_host: int
    share: int = 0
    at_peers: int = 0
    misses: int


class KvState(_Answer):
    """How one data-parallel rank's KV pool stands, in tokens.

    ``free + evictable + protected + in use = total``; ``protected`` is cache locked by running
    requests and by prompt streams. ``rode_along``: stream tokens prefilled beside decode steps.
    ``experts``: with ``--flashmoa-asyncep``. In bytes: ``kv_bytes`` of the pool; ``peak_bytes``,
    the most that the rank's process has had on its GPU, or in memory where there is none.
    ``shares``: whether requests that come at once compute a common prefix once; ``None`` where
    they never do, since no KV of prompts is kept, and of an engine that does not say.
    """

    dp_rank: int
    total: int
    free: int
    evictable: int
    protected: int
    pinned_streams: int
    gave_way: int
    duplicates_avoided: int
    rode_along: int = 0
    experts: ExpertMemory | None = None
    kv_bytes: int | None = None
    peak_bytes: int | None = None
    shares: bool | None = None


class Costs(_Answer):
    """What the engine's forwards take, in seconds: prefills as (tokens, seconds)."""

    points: list[tuple[int, float]]
    decode_step: float


class Saturation(_Answer):
    """From how many ``tokens`` on a forward hides the transfers of experts; ``None``: none does.

    ``largest_forward`` is the engine's, in tokens; ``transfer`` the seconds of one layer's experts,
    ``windows`` those of one layer's computing beside it, as (tokens, seconds).
    """

    tokens: int | None
    largest_forward: int
    transfer: float
    windows: list[tuple[int, float]]


class EngineInfo(_Answer):
    """``GET /flashmoa/info``; ``costs`` is ``None`` until they are measured.

    ``saturation``: with ``--flashmoa-asyncep``, as measured. ``prefills_wait_for``: tokens of a
    forward for which prefills are held back; ``None``: for none.
    """

    plugin: dict[str, str]
    sglang: dict[str, str]
    capabilities: list[str]
    model: dict[str, str]
    tokenizer: dict[str, Any]
    context_length: int
    prompt_streams: int
    kv: list[KvState]
    costs: Costs | None = None
    saturation: Saturation | None = None
    prefills_wait_for: int | None = None


class Prefilled(_Answer):
    """``POST /prefill_only``: ``prompt_tokens = cached_tokens + prefilled_tokens``."""

    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    seconds: float


class StreamState(_Answer):
    """A prompt stream: tokens that are certain, and of those how many have their KV.

    ``computed_tokens``: what its increments computed; the rest was in the cache, or shared.
    ``pace_seconds``: how long to gather text before the next append.
    """

    id: str
    received_tokens: int
    prefilled_tokens: int
    computed_tokens: int
    increments: int
    next_seq: int
    ended: bool
    ttl_seconds: float
    pace_seconds: float = 0.15


class Span(_Answer):
    """One prefill of a prompt stream: Unix seconds, and tokens computed."""

    start: float
    end: float
    tokens: int


class StreamUse(_Answer):
    """What a request was told about its prompt stream.

    ``status``: ``hit``, ``mispredicted``, or why there was none: ``used``, ``deleted``,
    ``expired``, ``unknown``.
    """

    id: str
    status: str
    prefills: list[Span] = []


class PromptUsage(_Answer):
    """How a request's prompt was computed, in tokens.

    ``prompt = cached + late``; of the cached, ``streamed`` were computed by the request's own
    prompt stream before the request came. ``None`` where the engine does not say.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    streamed_tokens: int | None = None
    late_tokens: int | None = None
    prompt_stream: StreamUse | None = None

    @classmethod
    def from_openai(cls, usage: dict[str, Any]) -> PromptUsage:
        """From the ``usage`` object of a chat completion."""
        details: dict[str, Any] = usage.get("prompt_tokens_details") or {}
        return cls(
            prompt_tokens=usage.get("prompt_tokens") or 0,
            completion_tokens=usage.get("completion_tokens") or 0,
            cached_tokens=details.get("cached_tokens"),
            streamed_tokens=details.get("streamed_tokens"),
            late_tokens=details.get("late_tokens"),
            prompt_stream=usage.get("prompt_stream"),
        )

    @classmethod
    def total(cls, several: Sequence[PromptUsage]) -> PromptUsage:
        """Of several requests together; what an engine does not say counts as nothing."""
        return cls(
            prompt_tokens=sum(one.prompt_tokens for one in several),
            completion_tokens=sum(one.completion_tokens for one in several),
            cached_tokens=sum(one.cached_tokens or 0 for one in several),
            streamed_tokens=sum(one.streamed_tokens or 0 for one in several),
            late_tokens=sum(one.late_tokens or 0 for one in several),
        )


class Delta(_Answer):
    """One step of a generation: what it added; the last one carries ``usage``.

    ``logprobs``: natural, of its tokens, where they were asked for.
    """

    text: str
    token_ids: list[int] = []
    logprobs: list[float] = []
    usage: PromptUsage | None = None
    finish_reason: str | None = None
