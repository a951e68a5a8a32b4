"""A larger network that begins by computing what a smaller one has learned.

As Net2Net has it (Chen et al. 2016): what is added has no effect at first. New parts of a
hidden state are zero, as what would write to them is; new heads, neurons and layers read but
write nothing. So the larger network goes on learning where the smaller one stood.
"""

# torch does not tell all of its types.
# pyright: basic

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from flashmoa_bench.family.network import HEAD, Layer, Network, NetworkShape


@torch.no_grad()
def widen(small: Network, large: Network) -> None:
    """Copy what ``small`` has learned into ``large``, just made and larger in every way."""
    before, after = small.shape, large.shape
    # A norm divides by the mean over all parts, of which some are zero now.
    gain = (before.hidden / after.hidden) ** 0.5
    large.model.embed_tokens.weight.zero_()
    _put(large.model.embed_tokens.weight, small.model.embed_tokens.weight)
    _put_gain(large.model.norm.weight, small.model.norm.weight, gain)
    sources, targets = (cast("list[Layer]", list(n.model.layers)) for n in (small, large))
    for target in targets:
        target.self_attn.o_proj.weight.zero_()
        target.mlp.down_proj.weight.zero_()
    for number, source in enumerate(sources):
        target = targets[round(number * (after.layers - 1) / (before.layers - 1))]
        _put_layer(target, source, gain)
        _put_heads(target, source, before, after)


def _put_layer(target: Layer, source: Layer, gain: float) -> None:
    _put_gain(target.input_layernorm.weight, source.input_layernorm.weight, gain)
    _put_gain(target.post_attention_layernorm.weight, source.post_attention_layernorm.weight, gain)
    _put(target.mlp.gate_proj.weight, source.mlp.gate_proj.weight)
    _put(target.mlp.up_proj.weight, source.mlp.up_proj.weight)
    _put(target.mlp.down_proj.weight, source.mlp.down_proj.weight)


def _put_heads(target: Layer, source: Layer, before: NetworkShape, after: NetworkShape) -> None:
    """Copy heads to where the keys and values that they share are."""
    to, of = target.self_attn, source.self_attn
    to.q_norm.weight.copy_(of.q_norm.weight)
    to.k_norm.weight.copy_(of.k_norm.weight)
    free = {kv: list[int]() for kv in range(before.kv_heads)}
    for kv in range(after.kv_heads):
        like = kv * before.kv_heads // after.kv_heads
        _put(_head(to.k_proj.weight, kv), _head(of.k_proj.weight, like))
        _put(_head(to.v_proj.weight, kv), _head(of.v_proj.weight, like))
        shared = after.heads // after.kv_heads
        free[like] += range(kv * shared, (kv + 1) * shared)
    for head in range(before.heads):
        at = free[head * before.kv_heads // before.heads].pop(0)
        _put(_head(to.q_proj.weight, at), _head(of.q_proj.weight, head))
        _put(_head(to.o_proj.weight.T, at), _head(of.o_proj.weight.T, head))


def _head(weight: Tensor, number: int) -> Tensor:
    return weight[number * HEAD : (number + 1) * HEAD]


def _put(target: Tensor, source: Tensor) -> None:
    """Copy into the first rows and columns; other columns of these rows stay as they are."""
    target[: source.shape[0], : source.shape[1]] = source


def _put_gain(target: Tensor, source: Tensor, gain: float) -> None:
    target[: source.shape[0]] = source * gain
