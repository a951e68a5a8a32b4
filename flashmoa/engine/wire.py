"""The engine API's bodies as types; ``docs/engine-api.md`` describes the routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

_NAMESPACE_FIELDS = ("cache_salt", "extra_key", "lora_path")


def kv_namespace(body: Mapping[str, Any]) -> dict[str, str]:
    """Return the namespace of a request's KV: cache salt, extra key, LoRA adapter, if it has any.

    A prompt stream serves requests of its own namespace only. The adapter may be part of the
    model's name, ``base:adapter``; the engine knows which part that is.

    Args:
        body: that of a chat completion or a generation.

    Returns: fields of the body that opens a prompt stream.
    """
    given = {name: body.get(name) for name in _NAMESPACE_FIELDS}
    found = {name: value for name, value in given.items() if isinstance(value, str) and value}
    model = body.get("model")
    return {**found, "model": model} if isinstance(model, str) and ":" in model else found


class _EngineAnswer(BaseModel):
    # An engine may be newer than this client.
    model_config = ConfigDict(extra="ignore", frozen=True)


class ExpertMemory(_EngineAnswer):
    """Where the experts of one rank's model are, in bytes.

    ``layers`` have experts; the device holds those of the first layer, and ``slots``. ``share`` is
    what this replica holds of the others, ``at_peers`` the rest of them. ``misses`` counts the
    experts that a forward waited for.
    """

    layers: int
    slots: int
    resident: int
    in_slots: int
    on_host: int
    share: int = 0
    at_peers: int = 0
    misses: int


class KvState(_EngineAnswer):
    """The KV pool of one data-parallel rank, in tokens.

    ``free + evictable + protected + in use = total``; ``protected`` is cache locked by running
    requests and by prompt streams. ``rode_along`` are stream tokens prefilled beside decode steps.
    ``experts`` is set with ``--flashmoa-asyncep``. In bytes: ``kv_bytes``, the pool;
    ``peak_bytes``, the most that the rank's process has had on its GPU, or in memory where there is
    no GPU. ``shares`` says whether requests that come at once compute a common prefix once; it is
    ``None`` where no KV of prompts is kept, and where the engine does not say.
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


class Costs(_EngineAnswer):
    """The duration of the engine's forwards in seconds; prefills as (tokens, seconds)."""

    points: list[tuple[int, float]]
    decode_step: float


class Saturation(_EngineAnswer):
    """The smallest forward, in ``tokens``, that hides the transfers of experts.

    ``tokens`` is ``None`` where no forward does.
    ``largest_forward`` is the engine's, in tokens. ``transfer`` is the time of one layer's experts
    in seconds, ``windows`` that of one layer's computation beside it, as (tokens, seconds).
    """

    tokens: int | None
    largest_forward: int
    transfer: float
    windows: list[tuple[int, float]]


class EngineInfo(_EngineAnswer):
    """The answer of ``GET /flashmoa/info``; ``costs`` is ``None`` until they are measured.

    ``saturation`` is measured with ``--flashmoa-asyncep``. ``prefills_wait_for`` is the size of the
    forward, in tokens, for which prefills are held back; ``None`` where they are not.
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


class Prefilled(_EngineAnswer):
    """The answer of ``POST /prefill_only``.

    ``prompt_tokens = cached_tokens + prefilled_tokens``.
    """

    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    seconds: float


class StreamState(_EngineAnswer):
    """The state of a prompt stream: its certain tokens, and how many of them have their KV.

    ``computed_tokens`` is what its increments computed; the rest was in the cache, or shared.
    ``pace_seconds`` is how long to gather text before the next append.
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


class Span(_EngineAnswer):
    """One prefill of a prompt stream: from when to when (Unix seconds), and the tokens computed."""

    start: float
    end: float
    tokens: int


class StreamUse(_EngineAnswer):
    """What the engine says of a request's prompt stream.

    ``status`` is ``hit``, ``mispredicted``, or why there was no stream: ``used``, ``deleted``,
    ``expired``, ``unknown``.
    """

    id: str
    status: str
    prefills: list[Span] = []


class PromptUsage(_EngineAnswer):
    """How a request's prompt was computed, in tokens.

    ``prompt = cached + late``; of the cached ones, ``streamed`` were computed by the request's own
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
        """Read the ``usage`` object of a chat completion."""
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
        """Add up several requests; what an engine does not say counts as zero."""
        return cls(
            prompt_tokens=sum(one.prompt_tokens for one in several),
            completion_tokens=sum(one.completion_tokens for one in several),
            cached_tokens=sum(one.cached_tokens or 0 for one in several),
            streamed_tokens=sum(one.streamed_tokens or 0 for one in several),
            late_tokens=sum(one.late_tokens or 0 for one in several),
        )


class Delta(_EngineAnswer):
    """One step of a generation: the text it added; the last one carries ``usage``.

    ``logprobs`` are those of its tokens (natural logarithm), where they were asked for.
    """

    text: str
    token_ids: list[int] = []
    logprobs: list[float] = []
    usage: PromptUsage | None = None
    finish_reason: str | None = None


class Nothing(_EngineAnswer):
    """An answer of which nothing is needed."""


class RenderedText(_EngineAnswer):
    """The answer of ``POST /render`` and of ``POST /detokenize``."""

    text: str


class PromptTokens(_EngineAnswer):
    """The answer of ``POST /tokenize`` for one prompt."""

    tokens: list[int]


class TextsTokens(_EngineAnswer):
    """The answer of ``POST /tokenize`` for several texts."""

    tokens: list[list[int]]


class _Embedding(_EngineAnswer):
    index: int
    embedding: list[float]


class Embeddings(_EngineAnswer):
    """The answer of ``POST /v1/embeddings``."""

    data: list[_Embedding]

    def in_order(self) -> list[list[float]]:
        """Return the vectors in the order of the texts."""
        return [one.embedding for one in sorted(self.data, key=lambda one: one.index)]
