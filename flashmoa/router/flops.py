"""What computing part of a prompt costs; pure.

All costs are whole numbers and add up exactly: ``work(a, b) + work(b, c) == work(a, c)``. So a load
that is raised by a request's cost and lowered by what an engine has computed of it does not drift.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flashmoa.errors import FlashMoAError

# The MLPs of these model types have two matrices, not three.
_UNGATED = {"gpt_neox", "nemotron", "phi", "starcoder2"}
_FULL = {"full_attention", "attention"}
_WINDOWED = {"sliding_attention"}


class Measure(Protocol):
    """A unit of prefill work; ``unit`` is its name."""

    @property
    def unit(self) -> str: ...

    def work(self, start: int, end: int) -> int:
        """Return the cost of tokens ``start`` to ``end`` when the first ``start`` are cached."""
        ...


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Work counted in tokens, for a model whose shape is unknown (MoE-Prefill §B.4)."""

    @property
    def unit(self) -> str:
        return "tokens"

    def work(self, start: int, end: int) -> int:
        return max(0, end - start)


@dataclass(frozen=True, slots=True)
class TrueFlops:
    """Work counted in FLOPs: each token's own, and those of each pair of a query and a key.

    Attributes:
        linear: FLOPs per token in the matrices of all layers.
        pair: FLOPs per query and key, over the layers that attend to everything.
        window_pair, window: the same over the layers that attend to ``window`` tokens only.

    The vocabulary's matrix is left out: prefill applies it to only one token of a prompt.
    """

    linear: int
    pair: int
    window_pair: int = 0
    window: int = 0

    @property
    def unit(self) -> str:
        return "FLOPs"

    def work(self, start: int, end: int) -> int:
        if end <= start:
            return 0
        pairs = _pairs(end) - _pairs(start)
        near = _pairs_within(end, self.window) - _pairs_within(start, self.window)
        return self.linear * (end - start) + self.pair * pairs + self.window_pair * near


def saturation(
    measure: Measure, batch_tokens: int, *, margin: float = 1.2, exposed: float = 1.0
) -> int:
    """Return ``T``, the work that keeps an engine's forwards full (MoE-Prefill Eq. 3).

    Args:
        batch_tokens: the most tokens that the engine computes in one forward.
        margin: kappa, the allowance for the time between two forwards.
        exposed: the slowest layer's time divided by the time of its computing alone; 1 where no
            weights are transferred, or where this is unknown.
    """
    return int(margin * max(1.0, exposed) * measure.work(0, batch_tokens))


def _pairs(length: int) -> int:
    """Return the number of causal pairs of a query and a key in ``length`` tokens."""
    return length * (length + 1) // 2


def _pairs_within(length: int, window: int) -> int:
    near = min(length, window)
    return _pairs(near) + (length - near) * window


class UnknownShape(FlashMoAError, ValueError):
    """Raised when a config does not determine what a token costs; count tokens instead."""


def true_flops(config: Mapping[str, Any]) -> TrueFlops:
    """Return a model's FLOPs from its ``config.json``, in the format of Hugging Face.

    Decoder-only transformers are known: dense or mixture of experts, with grouped-query or latent
    (MLA) attention and sliding windows. Raises: UnknownShape, naming the field, for anything else.
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
        """Return the first of these fields that has a usable number. Raises: UnknownShape."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
        raise UnknownShape(f"the model's config has no usable {' or '.join(names)}")

    def optional(self, name: str, otherwise: int) -> int:
        return self.number(name) if self.has(name) else otherwise


def _attention_layers(own: _Config, layers: int) -> tuple[int, int]:
    """Return how many layers attend to everything, and how many to a window."""
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
    """Return the parameters of a layer's attention, and its FLOPs per pair of tokens.

    A pair costs two products in every head.
    """
    hidden, heads = own.number("hidden_size"), own.number("num_attention_heads")
    wide = heads * own.optional("head_dim", hidden // max(1, heads))
    narrow = wide // max(1, heads) * own.optional("num_key_value_heads", heads)
    return 2 * hidden * (wide + narrow), 4 * wide


def _latent(own: _Config) -> tuple[int, int]:
    """Do the same for DeepSeek's latent attention, keys and values expanded as in prefill."""
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
    """Return the number of parameters that a token uses in this layer's MLP."""
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
