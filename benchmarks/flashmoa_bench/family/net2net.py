"""Initialise a larger network so that it computes what a smaller one has learned.

As in Net2Net (Chen et al. 2016), the added parts have no effect at first. New elements of a hidden
state are zero, and so are the weights that would write to them; new heads, neurons and layers read
but write nothing. So the larger network continues to learn where the smaller one stopped.
"""

# torch is not fully typed.
# pyright: basic

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from flashmoa_bench.family.network import HEAD, Layer, Network, NetworkShape


@torch.no_grad()
def widen(small: Network, large: Network) -> None:
    """Copy the weights of ``small`` into ``large``, a new network that is larger in every way."""
    before, after = small.shape, large.shape
    # A norm divides by the mean over all elements, some of which are zero now.
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
    """Copy each head to a place where it shares the same keys and values as before."""
    new, old = target.self_attn, source.self_attn
    new.q_norm.weight.copy_(old.q_norm.weight)
    new.k_norm.weight.copy_(old.k_norm.weight)
    # The heads of the larger network that share the keys and values of each old one.
    free_heads = {kv: list[int]() for kv in range(before.kv_heads)}
    for kv in range(after.kv_heads):
        old_kv = kv * before.kv_heads // after.kv_heads
        _put(_head_rows(new.k_proj.weight, kv), _head_rows(old.k_proj.weight, old_kv))
        _put(_head_rows(new.v_proj.weight, kv), _head_rows(old.v_proj.weight, old_kv))
        sharing = after.heads // after.kv_heads
        free_heads[old_kv] += range(kv * sharing, (kv + 1) * sharing)
    for old_head in range(before.heads):
        head = free_heads[old_head * before.kv_heads // before.heads].pop(0)
        _put(_head_rows(new.q_proj.weight, head), _head_rows(old.q_proj.weight, old_head))
        _put(_head_rows(new.o_proj.weight.T, head), _head_rows(old.o_proj.weight.T, old_head))


def _head_rows(weight: Tensor, number: int) -> Tensor:
    return weight[number * HEAD : (number + 1) * HEAD]


def _put(target: Tensor, source: Tensor) -> None:
    """Copy into the first rows and columns; other columns of these rows are not changed."""
    target[: source.shape[0], : source.shape[1]] = source


def _put_gain(target: Tensor, source: Tensor, gain: float) -> None:
    target[: source.shape[0]] = source * gain
