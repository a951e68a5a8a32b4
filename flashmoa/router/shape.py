"""A model's FLOPs from its ``config.json``; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashmoa.errors import FlashMoAError
from flashmoa.router.flops import TrueFlops

# Their MLPs have two matrices, not three.
_UNGATED = {"gpt_neox", "nemotron", "phi", "starcoder2"}
_FULL = {"full_attention", "attention"}
_WINDOWED = {"sliding_attention"}


class UnknownShape(FlashMoAError, ValueError):
    """Raised when a config does not say what a token costs; count tokens instead."""


def true_flops(config: Mapping[str, Any]) -> TrueFlops:
    """Of decoder-only transformers as Hugging Face configures them: dense or mixture of experts,
    grouped-query or latent (MLA) attention, sliding windows.

    Raises: UnknownShape, naming the field, for anything else.
    """
    own = _Config(config.get("text_config") or config)
    layers = own.number("num_hidden_layers")
    full, windowed = _attention_layers(own, layers)
    weights, pair = _latent(own) if own.has("kv_lora_rank") else _grouped(own)
    active = layers * weights + sum(_mlp(own, layer) for layer in range(layers))
    window = own.number("sliding_window") if windowed else 0
    return TrueFlops(2 * active, full * pair, windowed * pair, window)


class _Config:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def number(self, *names: str) -> int:
        """The first of these fields that there is."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
        raise UnknownShape(f"the model's config has no usable {' or '.join(names)}")

    def optional(self, name: str, otherwise: int) -> int:
        return self.number(name) if self.has(name) else otherwise


def _attention_layers(own: _Config, layers: int) -> tuple[int, int]:
    """How many layers attend to everything, and how many to a window."""
    if kinds := own.values.get("layer_types"):
        full = sum(kind in _FULL for kind in kinds)
        windowed = sum(kind in _WINDOWED for kind in kinds)
        if full + windowed != layers:
            raise UnknownShape("the model's layer_types are not all attention")
        return full, windowed
    if own.has("sliding_window") and own.values.get("use_sliding_window", True):
        return 0, layers
    return layers, 0


def _grouped(own: _Config) -> tuple[int, int]:
    """Parameters of a layer's attention, and FLOPs per pair: two products of all heads."""
    hidden, heads = own.number("hidden_size"), own.number("num_attention_heads")
    wide = heads * own.optional("head_dim", hidden // max(1, heads))
    narrow = wide // max(1, heads) * own.optional("num_key_value_heads", heads)
    return 2 * hidden * (wide + narrow), 4 * wide


def _latent(own: _Config) -> tuple[int, int]:
    """The same for DeepSeek's latent attention, keys and values expanded as in prefill."""
    hidden, heads = own.number("hidden_size"), own.number("num_attention_heads")
    nope, rope = own.number("qk_nope_head_dim"), own.number("qk_rope_head_dim")
    value, latent = own.number("v_head_dim"), own.number("kv_lora_rank")
    key = nope + rope
    if own.has("q_lora_rank"):
        rank = own.number("q_lora_rank")
        queries = rank * (hidden + heads * key)
    else:
        queries = hidden * heads * key
    weights = queries + hidden * (latent + rope) + latent * heads * (nope + value)
    return weights + heads * value * hidden, 2 * heads * (key + value)


def _mlp(own: _Config, layer: int) -> int:
    """Parameters that a token uses in this layer's MLP."""
    hidden = own.number("hidden_size")
    if not _is_sparse(own, layer):
        matrices = 2 if own.values.get("model_type") in _UNGATED else 3
        return matrices * hidden * own.number("intermediate_size")
    width = own.number("moe_intermediate_size", "intermediate_size")
    used = own.number("num_experts_per_tok", "experts_per_token")
    shared = own.optional("n_shared_experts", 0) * width
    shared += own.optional("shared_expert_intermediate_size", 0)
    return hidden * (3 * (used * width + shared) + _experts(own))


def _experts(own: _Config) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return max((own.number(name) for name in names if own.has(name)), default=0)


def _is_sparse(own: _Config, layer: int) -> bool:
    if _experts(own) < 2 or layer < own.optional("first_k_dense_replace", 0):
        return False
    if layer in (own.values.get("mlp_only_layers") or []):
        return False
    step = own.optional("decoder_sparse_step", 1)
    return (layer + 1) % max(1, step) == 0
