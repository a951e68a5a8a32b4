"""Define Qwen3's network in plain torch, for training on a CPU.

Its parameters have the names and the meaning of those of transformers' ``Qwen3ForCausalLM``, which
can load them. It computes in bfloat16, for which CPUs have matrix units.
"""

# torch, transformers and tokenizers are not fully typed.
# pyright: basic

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD = 32
CONTEXT = 4096
_ROPE_BASE = 10_000.0
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """Sizes of a model; its heads have 32 numbers each."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int


SHAPES = {
    "small": NetworkShape(layers=3, hidden=96, intermediate=256, heads=4, kv_heads=2),
    "medium": NetworkShape(layers=4, hidden=128, intermediate=384, heads=4, kv_heads=2),
    "large": NetworkShape(layers=5, hidden=192, intermediate=512, heads=6, kv_heads=2),
}


class Network(nn.Module):
    """Maps token ids (batch, length) to hidden states (batch, length, hidden)."""

    def __init__(self, shape: NetworkShape, vocabulary: int) -> None:
        super().__init__()
        self.shape = shape
        self.model = Stack(shape, vocabulary)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                spread = 1 / weight.shape[1] ** 0.5
                nn.init.normal_(weight, std=spread / (2 * shape.layers) ** 0.5 if last else spread)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight.bfloat16()).float()


class Stack(nn.Module):
    def __init__(self, shape: NetworkShape, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)
        self.cosine, self.sine = _rotations()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed_tokens(tokens).bfloat16()
        length = tokens.shape[1]
        future = torch.full((length, length), -1e4, dtype=torch.bfloat16).triu(1)
        rotation = self.cosine[:length], self.sine[:length], future
        for layer in self.layers:
            hidden = layer(hidden, rotation)
        return self.norm(hidden)


class Layer(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.mlp = GatedMlp(shape)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.q_proj = Linear(shape.hidden, shape.heads * HEAD)
        self.k_proj = Linear(shape.hidden, shape.kv_heads * HEAD)
        self.v_proj = Linear(shape.hidden, shape.kv_heads * HEAD)
        self.o_proj = Linear(shape.heads * HEAD, shape.hidden)
        self.q_norm, self.k_norm = Norm(HEAD), Norm(HEAD)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        batch, length, _ = hidden.shape
        q = self.q_norm(self.q_proj(hidden).view(batch, length, self.heads, HEAD))
        k = self.k_norm(self.k_proj(hidden).view(batch, length, self.kv_heads, HEAD))
        v = self.v_proj(hidden).view(batch, length, self.kv_heads, HEAD)
        q, k = (_rotate(x.transpose(1, 2).contiguous(), rotation) for x in (q, k))
        v = v.transpose(1, 2)
        shared = self.heads // self.kv_heads
        if length > 256:
            k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # Plain products are faster if the whole matrix of attention weights is small.
            q = q.view(batch * self.kv_heads, shared * length, HEAD)
            k, v = (x.reshape(batch * self.kv_heads, length, HEAD) for x in (k, v))
            scores = torch.bmm(q * HEAD**-0.5, k.transpose(1, 2)).view(-1, length, length)
            weights = torch.softmax(scores + rotation[2], -1).view(-1, shared * length, length)
            mixed = torch.bmm(weights, v).view(batch, self.heads, length, HEAD)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, self.heads * HEAD))


class GatedMlp(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.intermediate)
        self.up_proj = Linear(shape.hidden, shape.intermediate)
        self.down_proj = Linear(shape.intermediate, shape.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Linear(nn.Module):
    """Keeps its weights in float32 and applies them in bfloat16."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight.bfloat16())


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, hidden: Tensor) -> Tensor:
        return _RootMeanSquare.apply(hidden, self.weight)


class _RootMeanSquare(torch.autograd.Function):
    """Computes the RMS norm in few passes over memory, which limits the speed of small networks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        size = hidden.shape[-1]
        square = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32).pow(2)
        scale = torch.rsqrt(square / size + _EPSILON).bfloat16()
        unit, narrow = hidden * scale, weight.bfloat16()
        ctx.save_for_backward(unit, scale, narrow)
        return unit * narrow

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        unit, scale, weight = ctx.saved_tensors
        products = (gradient * unit).flatten(0, -2)
        weight_gradient = products.sum(0, dtype=torch.float32)
        projection = torch.mv(products, weight).view(scale.shape) / unit.shape[-1]
        hidden_gradient = (gradient * weight).addcmul_(unit, projection, value=-1).mul_(scale)
        return hidden_gradient, weight_gradient


def _rotations() -> tuple[Tensor, Tensor]:
    """Return the cosines and signed sines of the rotary embedding, by position and element."""
    turns = _ROPE_BASE ** -(torch.arange(0, HEAD, 2) / HEAD)
    angles = torch.outer(torch.arange(CONTEXT).float(), turns).repeat(1, 2)
    signs = torch.tensor([-1.0] * (HEAD // 2) + [1.0] * (HEAD // 2))
    return angles.cos().bfloat16(), (angles.sin() * signs).bfloat16()


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    cosine, sine, _ = rotation
    left, right = heads.chunk(2, -1)
    return heads * cosine + torch.cat((right, left), -1) * sine


def configuration(shape: NetworkShape, tokenizer: Any) -> Any:
    """Make the configuration of the network for transformers and SGLang."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=HEAD,
        rms_norm_eps=_EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_BASE},
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.pad_token_id,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )
