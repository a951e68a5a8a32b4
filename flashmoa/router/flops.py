"""Compute what a part of a prompt costs, in FLOPs or in tokens. Pure.

All costs are whole numbers and add up exactly: ``work(a, b) + work(b, c) == work(a, c)``. So a load
that grows by a request's cost, and falls with each computed part of the prompt, does not drift.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashmoa.errors import FlashMoAError

# The MLPs of these model types have two matrices, other MLPs three.
_UNGATED = {"gpt_neox", "nemotron", "phi", "starcoder2"}
# Values in ``layer_types`` for layers that attend to the whole prompt, and to a window.
_FULL = {"full_attention", "attention"}
_WINDOWED = {"sliding_attention"}
# The assumed length of the prompts in a forward.
PROMPT_TOKENS = 4096
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Measure:
    """Measures work by the costs of each token and of each pair of a query and a key.

    The vocabulary's matrix is left out, because prefill applies it to only one token of a prompt.
    Layers that attend only to a window cost the whole window per token, which ``linear`` contains.
    """

    linear: int
    pair: int = 0
    unit: str = "FLOPs"

    def work(self, start: int, end: int) -> int:
        """Return the cost of tokens ``start`` to ``end`` when the first ``start`` are cached."""
        if end <= start:
            return 0
        pairs = end * (end + 1) // 2 - start * (start + 1) // 2
        return self.linear * (end - start) + self.pair * pairs

    def forward_work(self, tokens: int) -> int:
        """Return the cost of a forward: uncached prompts of equal length, and a part of one."""
        whole, rest = divmod(tokens, PROMPT_TOKENS)
        return whole * self.work(0, PROMPT_TOKENS) + self.work(0, rest)


# For a model whose shape is unknown (MoE-Prefill §B.4).
TOKENS = Measure(1, unit="tokens")


class UnknownShape(FlashMoAError, ValueError):
    """Raised when a model's config does not determine a token's cost; count tokens instead."""


def true_flops(config: Mapping[str, Any]) -> Measure:
    """Return the FLOPs of a decoder, given its ``config.json`` in Hugging Face's format.

    The model may be a mixture of experts, and have latent attention (MLA) and sliding windows.

    Raises: UnknownShape, naming the field, for another model; ValueError for a config that is no
        object.
    """
    try:
        fields = _Config({**(config.get("text_config") or config)})
    except (AttributeError, TypeError):
        raise ValueError(f"a model's config must be an object, not {config!r}") from None
    layers = fields.number("num_hidden_layers")
    full, windowed = _attention_layers(fields, layers)
    attention = _latent_attention if fields.has("kv_lora_rank") else _grouped_attention
    parameters, pair = attention(fields)
    active = layers * parameters + sum(_mlp_parameters(fields, layer) for layer in range(layers))
    window = fields.number("sliding_window") if windowed else 0
    return Measure(2 * active + windowed * pair * window, full * pair)


class _Config:
    """Reads the fields of a model's config; null fields count as missing."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the first of these fields that is a number.

        Raises: UnknownShape if no field is one, unless all are missing and there is a default.
        """
        given = [self.values.get(name) for name in names]
        for value in given:
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
        if default is not None and not any(map(self.has, names)):
            return default
        raise UnknownShape(
            f"{' or '.join(names)} in the model's config must be a whole number of at least 0, not "
            f"{' or '.join(map(repr, given))}"
        )


def _attention_layers(config: _Config, layers: int) -> tuple[int, int]:
    """Return the numbers of layers that attend to the whole prompt, and to a window."""
    if kinds := list(map(str, config.values.get("layer_types") or ())):
        full = sum(kind in _FULL for kind in kinds)
        windowed = sum(kind in _WINDOWED for kind in kinds)
        if full + windowed != layers:
            kinds = sorted({*kinds} - _FULL - _WINDOWED)
            raise UnknownShape(f"layer_types must name the attention of {layers} layers: {kinds}")
        return full, windowed
    is_windowed = config.has("sliding_window") and config.values.get("use_sliding_window", True)
    return (0, layers) if is_windowed else (layers, 0)


def _grouped_attention(config: _Config) -> tuple[int, int]:
    """Return the parameters of a layer's attention, and its FLOPs per pair of a query and a key.

    A pair costs two products in every head: query by key, and weight by value.
    """
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    query_width = heads * config.number("head_dim", default=hidden // max(1, heads))
    key_heads = config.number("num_key_value_heads", default=heads)
    key_width = query_width // max(1, heads) * key_heads
    return 2 * hidden * (query_width + key_width), 4 * query_width


def _latent_attention(config: _Config) -> tuple[int, int]:
    """Return the same as :func:`_grouped_attention` for DeepSeek's latent attention.

    Keys and values are expanded, as in prefill.
    """
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    nope, rope = config.number("qk_nope_head_dim"), config.number("qk_rope_head_dim")
    value, latent = config.number("v_head_dim"), config.number("kv_lora_rank")
    key = nope + rope
    queries = hidden * heads * key
    if config.has("q_lora_rank"):
        queries = config.number("q_lora_rank") * (hidden + heads * key)
    parameters = queries + hidden * (latent + rope) + latent * heads * (nope + value)
    return parameters + heads * value * hidden, 2 * heads * (key + value)


def _mlp_parameters(config: _Config, layer: int) -> int:
    """Return the number of parameters that a token uses in this layer's MLP."""
    hidden = config.number("hidden_size")
    experts = max(config.number(name, default=0) for name in _EXPERTS)
    is_dense = (
        experts < 2
        or layer < config.number("first_k_dense_replace", default=0)
        or layer in (config.values.get("mlp_only_layers") or [])
        or (layer + 1) % max(1, config.number("decoder_sparse_step", default=1)) != 0
    )
    if is_dense:
        matrices = 2 if config.values.get("model_type") in _UNGATED else 3
        return matrices * hidden * config.number("intermediate_size")
    width = config.number("moe_intermediate_size", "intermediate_size")
    used = config.number("num_experts_per_tok", "experts_per_token")
    shared = config.number("n_shared_experts", default=0) * width
    shared += config.number("shared_expert_intermediate_size", default=0)
    # The layer's gate, which chooses the experts, has a column for each expert.
    return hidden * (3 * (used * width + shared) + experts)
