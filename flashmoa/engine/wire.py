"""Define the bodies of the engine API as types; ``docs/engine-api.md`` describes the routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

# Requests share KV only if they have the same values of these fields.
NAMESPACE_FIELDS = ("cache_salt", "extra_key", "lora_path")
# Fields that SGLang, vLLM and others pass to chat templates, or to their own chat encoders.
_PROMPT_FIELDS = (
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "reasoning_effort",
    "reasoning",
    "thinking",
    "task",
    "continue_final_message",
    "add_generation_prompt",
)

# Request headers, used to leave bodies unchanged: the id of a call that a client listens to, the id
# of the call's prompt stream, and the likely number of tokens of its answer. SGLang's routers
# forward headers whose names begin like these.
CALL_HEADER = "X-Request-Id-FlashMoA"
STREAM_HEADER = f"{CALL_HEADER}-Stream"
TOKENS_HEADER = f"{CALL_HEADER}-Tokens"
# The id of a channel of calls.
CHANNEL_HEADER = "X-FlashMoA-Channel"
# A front end of Dynamo forwards the id of a call only in this header.
DYNAMO_HEADER = "X-Dynamo-Request-Id"


def kv_namespace(body: Mapping[str, Any]) -> dict[str, str]:
    """Return the namespace of a request's KV: its cache salt, extra key and LoRA adapter, if any.

    A prompt stream serves only requests of its own namespace, so the request that opens the stream
    needs these fields, too. The adapter may be part of the model's name, ``base:adapter``; the
    engine knows which part.
    """
    values = {name: body.get(name) for name in NAMESPACE_FIELDS}
    fields = {name: value for name, value in values.items() if isinstance(value, str) and value}
    model = body.get("model")
    return {**fields, "model": model} if isinstance(model, str) and ":" in model else fields


def prompt_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat request that shape its prompt, without the messages.

    A prediction needs them all: ``await engine.render(messages, **prompt_fields(body))``. It is
    wrong from the first place where the prompt shows a missing field. The server interprets the
    fields: with ``tool_choice`` ``none``, for instance, it shows the model no tools.
    """
    fields = {name: body.get(name) for name in _PROMPT_FIELDS}
    return {name: value for name, value in fields.items() if value not in (None, [], {})}


class _EngineAnswer(BaseModel):
    # A newer engine may add fields.
    model_config = ConfigDict(extra="ignore", frozen=True)


class ExpertMemory(_EngineAnswer):
    """The places of a rank's experts.

    ``layers`` is the number of layers with experts. A slot on the device has room for the experts
    of one layer after the first; ``slots`` is the number of slots. ``misses`` counts the forwards
    that waited for a layer's experts. The others are numbers of bytes. On the device, ``resident``
    is the first layer's experts, and ``in_slots`` the slots. Of the other layers' experts,
    ``on_host`` are in host memory, which replicas share, ``share`` on this replica's device, and
    ``at_peers`` on the devices of other replicas.
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
    """The KV pool of a data-parallel rank, in tokens.

    ``free + evictable + protected + in use = total``; ``protected`` is cache locked by running
    requests and by prompt streams. ``rode_along`` counts tokens of streams that were prefilled
    together with decode steps. ``experts`` is set with ``--flashmoa-asyncep``. In bytes:
    ``kv_bytes``, the size of the pool, and ``peak_bytes``, the most GPU memory that the rank's
    process has used (main memory without a GPU). ``shares`` says whether requests that arrive
    together compute a common prefix once; ``None`` if the engine keeps no KV of prompts.
    ``no_rides`` says why no tokens of streams share a forward with decode steps, and ``late_kv``
    why KV can be found only once it is computed; both are empty if there is no such reason. Fields
    that the engine does not report are ``None``.
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
    no_rides: str | None = None
    late_kv: str | None = None


class StreamedTokens(_EngineAnswer):
    """Tokens of the streams of text that have ended.

    ``ahead`` of the ``total`` tokens were known, and could be prefilled, before the text ended.
    """

    total: int
    ahead: int


class Costs(_EngineAnswer):
    """The durations of forwards in seconds: a decode step, and prefills as (tokens, seconds).

    They hold without context. Each token whose KV a decode step reads adds ``per_kv_token``. Each
    pair of a prefilled token and an earlier, cached token adds ``per_pair``.
    """

    points: list[tuple[int, float]]
    decode_step: float
    mixed: list[tuple[int, int, float]] = []
    per_kv_token: float = 0.0
    per_pair: float = 0.0


class Saturation(_EngineAnswer):
    """The smallest forward that hides the transfers of experts.

    ``tokens`` is its size, ``None`` if there is none; ``largest_forward`` is the size of the
    engine's largest forward. ``transfer`` is the time in seconds to transfer one layer's experts.
    ``windows`` are durations of computing one layer during a transfer, as (tokens, seconds).
    """

    tokens: int | None
    largest_forward: int
    transfer: float
    windows: list[tuple[int, float]]


class EngineInfo(_EngineAnswer):
    """The answer of ``GET /flashmoa/info``; ``costs`` is ``None`` until they are measured.

    ``saturation`` is measured with ``--flashmoa-asyncep``. ``prefills_wait_for`` is the forward
    size in tokens until which prefills are held back; ``None`` if they are not.
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
    streamed_tokens: StreamedTokens | None = None


class Prefilled(_EngineAnswer):
    """The answer of ``POST /prefill_only``.

    ``prompt_tokens = cached_tokens + prefilled_tokens``.
    """

    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    seconds: float


class StreamState(_EngineAnswer):
    """The state of a prompt stream: how many tokens it has received, and how many have KV.

    The stream's own increments computed ``computed_tokens``; the other tokens were in the cache or
    shared. A client should collect text for ``pace_seconds`` before the next append.
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
    """One prefill of a prompt stream, with its times in Unix seconds.

    ``delay_seconds`` estimates how much later answers that the engine was writing got their next
    tokens; ``None`` if the engine does not say.
    """

    start: float
    end: float
    tokens: int
    delay_seconds: float | None = None


class StreamUse(_EngineAnswer):
    """How a request used its prompt stream.

    ``status`` is ``hit``, ``mispredicted``, or why the stream could not be used; see
    ``docs/engine-api.md``. ``saved_seconds`` estimates, from the engine's measured costs, the time
    of computing the streamed tokens with the request; ``None`` without measured costs.
    """

    id: str
    status: str
    prefills: list[Span] = []
    saved_seconds: float | None = None


class PromptUsage(_EngineAnswer):
    """How a request's prompt was computed, in tokens.

    ``prompt = cached + late``. The request's own prompt stream computed ``streamed`` of the cached
    tokens before the request arrived. Fields that the engine does not report are ``None``.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    streamed_tokens: int | None = None
    late_tokens: int | None = None
    prompt_stream: StreamUse | None = None

    @classmethod
    def from_openai(cls, usage: dict[str, Any]) -> PromptUsage:
        """Convert the ``usage`` object of a chat completion, or of the Responses API."""
        is_chat = "prompt_tokens" in usage
        before, after = ("prompt", "completion") if is_chat else ("input", "output")
        details: dict[str, Any] = usage.get(f"{before}_tokens_details") or {}
        return cls(
            prompt_tokens=usage.get(f"{before}_tokens") or 0,
            completion_tokens=usage.get(f"{after}_tokens") or 0,
            cached_tokens=details.get("cached_tokens"),
            streamed_tokens=details.get("streamed_tokens"),
            late_tokens=details.get("late_tokens"),
            prompt_stream=usage.get("prompt_stream"),
        )

    @classmethod
    def total(cls, usages: Sequence[PromptUsage]) -> PromptUsage:
        """Add up the usage of several requests; a field that is ``None`` counts as zero."""
        return cls(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens or 0 for usage in usages),
            streamed_tokens=sum(usage.streamed_tokens or 0 for usage in usages),
            late_tokens=sum(usage.late_tokens or 0 for usage in usages),
        )


class Delta(_EngineAnswer):
    """One step of a generation: the text that it added; the last step has the ``usage``.

    ``logprobs`` are the log-probabilities (natural logarithm) of its tokens, if requested. A parser
    on the engine has separated ``reasoning`` from the answer. ``tool_calls`` are pieces of calls in
    the form of OpenAI's API; see :func:`add_tool_calls`.
    """

    text: str
    reasoning: str = ""
    token_ids: list[int] = []
    logprobs: list[float] = []
    tool_calls: list[dict[str, Any]] = []
    usage: PromptUsage | None = None
    finish_reason: str | None = None


class StreamFigures(_EngineAnswer):
    """How a request used a prompt stream that it found by its prompt; see :class:`PromptUsage`."""

    cached_tokens: int
    streamed_tokens: int
    late_tokens: int
    prompt_stream: StreamUse


class DeletedStream(_EngineAnswer):
    """The answer of ``DELETE /prompt_streams/{id}``."""

    usage: StreamFigures | None = None


class RenderedText(_EngineAnswer):
    """The answer of ``POST /render`` and of ``POST /detokenize``. vLLM calls it a prompt."""

    text: str = Field(validation_alias=AliasChoices("text", "prompt"))


class PromptTokens(_EngineAnswer):
    """The answer of ``POST /tokenize`` for one prompt."""

    tokens: list[int]


class TextsTokens(_EngineAnswer):
    """The answer of ``POST /tokenize`` for several texts."""

    tokens: list[list[int]]


class Similarities(_EngineAnswer):
    """The answer of ``POST /flashmoa/similarities``."""

    similarities: list[list[float]]
