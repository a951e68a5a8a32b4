"""How ``--flashmoa-asyncep`` divides a GPU's memory: ``make_plan``, arithmetic without a GPU.

The weights that stay on the device, the KV pool and the tensors of the largest forward share the
memory. The sizes follow from the model's ``config.json`` and from the tensors that SGLang makes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_GIB = 1 << 30
# Bytes that CUDA's context and libraries take before the weights are loaded: twice the usual.
CONTEXT = 2 * _GIB
# Bytes for the buffers of NCCL and of SGLang's all-reduce, with tensor parallelism.
COMMUNICATION = _GIB
# Factor for the allocator's fragments and the kernels' workspaces.
_MARGIN = 1.5
# Bytes for the logits of a forward of many short prompts, whatever the forward's length.
_LOGITS = 2 * _GIB
# Tokens of the forwards to choose from, the best one first. A longer one than the first would hide
# no more: a layer's computation takes longer than its copy from some 80,000 tokens on, on an H200.
# The last one is SGLang's own choice on these GPUs.
_FORWARDS = (131_072, 65_536, 32_768, 16_384, 8_192)
# One slot computes while the other is filled. With a single slot, a layer's experts are copied
# only while layers compute outside their experts.
_SLOTS = (2, 1)
# SGLang admits the next forward while the KV of the last one is still held.
_FORWARDS_IN_POOL = 2
# The key of an expert's width, for the models whose tensors are all in the sums below.
_WIDTHS = {
    "mixtral": "intermediate_size",
    "olmoe": "intermediate_size",
    "qwen3": "intermediate_size",
    "qwen3_moe": "moe_intermediate_size",
}
# In FP8, each block of 128 x 128 weights has a scale of 4 bytes.
_WEIGHTS_PER_SCALE_BYTE = 128 * 128 // 4


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model that decide how much memory it needs.

    Attributes:
        experts: of each layer; a dense layer is one expert that all tokens use.
        width: of an expert's gate and up projections.
        fp8: whether the weights of linear layers and experts have one byte each, and not two. KV
            and activations are in bfloat16.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    experts: int
    experts_per_token: int
    width: int
    vocabulary: int
    tied: bool
    fp8: bool

    @classmethod
    def read(cls, config: Mapping[str, Any], quantization: str | None = None) -> ModelSizes:
        """Read a model's ``config.json``.

        Args:
            quantization: what ``--quantization`` says, ``None`` if it is not given.

        Raises: ValueError if the model or its quantization is none whose memory is known.
        """
        kind = config.get("model_type")
        if kind not in _WIDTHS:
            known = ", ".join(sorted(_WIDTHS))
            raise ValueError(f"the memory of model_type {kind!r} is not known (known: {known})")
        needed = {
            "hidden_size",
            "num_attention_heads",
            "num_hidden_layers",
            "vocab_size",
            _WIDTHS[kind],
        }
        if missing := ", ".join(sorted(needed - config.keys())):
            raise ValueError(f"config.json has no {missing}")
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise ValueError("some layers have no experts, and their memory is not known")
        stored = (config.get("quantization_config") or {}).get("quant_method")
        quantization = quantization or stored
        if quantization not in (None, "fp8"):
            raise ValueError(f"the memory of quantization {quantization!r} is not known")
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head=config.get("head_dim") or config["hidden_size"] // heads,
            experts=config.get("num_experts") or config.get("num_local_experts") or 1,
            experts_per_token=config.get("num_experts_per_tok") or 1,
            width=config[_WIDTHS[kind]],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings")),
            fp8=quantization == "fp8",
        )

    def of_rank(self, ranks: int) -> ModelSizes:
        """Return the sizes on each GPU of tensor parallelism, which divides heads and experts.

        Raises: ValueError if they cannot be divided.
        """
        if self.heads % ranks or self.width % ranks:
            raise ValueError(
                f"{self.heads} heads and experts of width {self.width} are not divisible by "
                f"{ranks} (--tp-size)"
            )
        return replace(
            self,
            heads=self.heads // ranks,
            kv_heads=max(1, self.kv_heads // ranks),
            width=self.width // ranks,
            vocabulary=-(-self.vocabulary // ranks),
        )

    @property
    def copied_bytes(self) -> int:
        """The bytes of the experts that are copied: of all layers but the first."""
        return self.expert_bytes * (self.layers - 1)

    @property
    def expert_bytes(self) -> int:
        """The bytes of all experts of one layer."""
        return self._linear_bytes(self.experts * 3 * self.hidden * self.width)

    @property
    def other_bytes(self) -> int:
        """The bytes of all weights but the experts: attention, routers, embeddings, the head."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head
        router = self.hidden * self.experts if self.experts > 1 else 0
        layer = self._linear_bytes(attention) + 2 * (router + 2 * self.hidden)
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + 2 * embeddings

    def _linear_bytes(self, weights: int) -> int:
        return weights + weights // _WEIGHTS_PER_SCALE_BYTE if self.fp8 else 2 * weights

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head * 2

    def peak_bytes(self, tokens: int) -> int:
        """Return how many bytes a forward needs at its peak for the tensors that SGLang makes.

        Assumes Triton's kernels for experts, which have a row for each token and expert.
        """
        rows, inner = self.experts_per_token, self.width
        # Gate and up projections, their product, and the down projection.
        feed_forward = 2 * rows * (2 * inner + inner + self.hidden)
        # Queries, keys and values, together and split; the result.
        attention = 2 * (2 * (self.heads + 2 * self.kv_heads) * self.head + self.heads * self.head)
        if self.fp8:
            # The inputs of both projections, and of the attention's, again in one byte each.
            feed_forward += self.hidden + rows * inner
            attention += self.hidden + self.heads * self.head
        # The input, the output, the residual and its sum.
        return tokens * (2 * 4 * self.hidden + max(feed_forward, attention))


@dataclass(frozen=True, slots=True)
class Plan:
    """How the memory is divided. Sizes are in bytes.

    Attributes:
        slots: layers whose experts the device holds besides the first layer's.
        forward: tokens of the largest forward.
        fraction: share of the free memory for weights and KV (``--mem-fraction-static``).
        weights: on each GPU, with its share of experts.
        peak: what a forward of ``forward`` tokens needs for its tensors.
        left: what the fraction leaves for forwards.
        pool: tokens in the KV pool.
    """

    slots: int
    forward: int
    fraction: float
    weights: int
    peak: int
    left: int
    pool: int


def make_plan(
    sizes: ModelSizes,
    free: int,
    *,
    forward: int | None = None,
    fraction: float | None = None,
    slots: int | None = None,
    share: float = 0.0,
) -> Plan:
    """Return the plan with the most slots of two and, with these, the longest forward that fits.

    Args:
        free: bytes of the device's memory that are free before the server starts.
        forward, fraction, slots: are taken as they are, where they are given.
        share: which part of the copied experts stays on this device for all replicas.

    Raises: ValueError if nothing fits, or the model has no experts to copy.
    """
    if sizes.experts == 1:
        raise ValueError("the model has no experts")
    usable = free - CONTEXT
    # A forward that the user wants so long need not be followed by another at once.
    forwards_in_pool = 1 if forward else _FORWARDS_IN_POOL
    plans = [
        _divide(sizes, usable, tokens, fraction, count, share)
        for count in ([slots] if slots else _SLOTS)
        for tokens in ([forward] if forward else _FORWARDS)
    ]
    for plan in plans:
        if _room(plan.peak) <= plan.left and plan.pool >= forwards_in_pool * plan.forward:
            return plan
    least = plans[-1]
    kv = forwards_in_pool * least.forward * sizes.kv_bytes_per_token
    raise ValueError(
        f"forwards of {least.forward} tokens do not fit: by --mem-fraction-static "
        f"{least.fraction}, {_gib(usable - least.left)} are for weights ({_gib(least.weights)}) "
        f"and KV ({_gib(kv)} at least), and {_gib(least.left)} for the tensors of a forward "
        f"({_gib(_room(least.peak))})"
    )


def _divide(
    sizes: ModelSizes,
    usable: int,
    forward: int,
    fraction: float | None,
    slots: int,
    share: float,
) -> Plan:
    peak = sizes.peak_bytes(forward)
    if fraction is None:
        fraction = max(0.0, math.floor(100 * (1 - _room(peak) / usable)) / 100)
    held = sizes.expert_bytes * min(sizes.layers, 1 + slots)
    weights = sizes.other_bytes + held + round(sizes.copied_bytes * share)
    left = round(usable * (1 - fraction))
    return Plan(
        slots=slots,
        forward=forward,
        fraction=fraction,
        weights=weights,
        peak=peak,
        left=left,
        pool=max(0, usable - left - weights) // sizes.kv_bytes_per_token,
    )


def _room(peak: int) -> int:
    """Return the bytes to leave for forwards that need ``peak`` bytes by the tensors' sizes."""
    return round(_MARGIN * peak) + _LOGITS


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
