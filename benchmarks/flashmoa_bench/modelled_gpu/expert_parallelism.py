"""Compute what ways to divide a mixture of experts over GPUs copy and keep. Pure.

After MoE-Prefill's Table 1 and §4.1. Its formulas are lost in the text that we have, so these are
derived from the collective operations that the table names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from flashmoa_bench.modelled_gpu.gpu import Model

# With AsyncEP, a GPU has the experts of the first layer, and slots for two layers.
_LAYERS_AT_HAND = 3
_ACTIVATION_BYTES = 2


class Division(StrEnum):
    """Names ways to divide the attention and the experts; AsyncEP's ways have whole attention."""

    DP_DP = "DP+DP"
    DP_TP = "DP+TP"
    DP_EP = "DP+EP"
    TP_TP = "TP+TP"
    TP_EP = "TP+EP"
    PP = "PP"
    D2D = "AsyncEP d2d"
    H2D = "AsyncEP h2d"
    # A part of each layer's experts is on the GPUs, and each GPU copies the rest from the host.
    HYBRID = "AsyncEP hybrid"
    # Each GPU copies 1/N of each layer from the host, and the GPUs exchange these (§6.3).
    PAPERS_HYBRID = "AsyncEP hybrid, 1/N"


@dataclass(frozen=True, slots=True)
class LayerTraffic:
    """Bytes that one GPU receives in one layer of a forward, on average over the layers.

    Attributes:
        peers: from other GPUs.
        host: from host memory.
    """

    peers: float = 0.0
    host: float = 0.0


def layer_traffic(
    division: Division, model: Model, gpus: int, tokens: int, *, on_device: float = 0.5
) -> LayerTraffic:
    """Return the bytes that one GPU receives in one layer (Table 1).

    Args:
        tokens: number of tokens in a forward: with DP and PP of each GPU, with TP of all together.
        on_device: share of the experts that ``HYBRID`` keeps on the GPUs.
    """
    experts, others = model.expert_bytes, (gpus - 1) / gpus
    states = tokens * model.config["hidden_size"] * _ACTIVATION_BYTES
    routed = model.experts_per_token * states
    match division:
        case Division.DP_DP:
            return LayerTraffic()
        case Division.DP_TP:  # An all-gather of all GPUs' tokens, and a reduce-scatter.
            return LayerTraffic(2 * (gpus - 1) * states)
        case Division.DP_EP:  # Each token goes to its experts, and comes back.
            return LayerTraffic(2 * routed * others)
        case Division.TP_TP:  # Two all-reduces, which send everything twice.
            return LayerTraffic(4 * states * others)
        case Division.TP_EP:
            return LayerTraffic((2 * states + 2 * routed / gpus) * others)
        case Division.PP:  # A stage receives and sends once, whatever its number of layers.
            return LayerTraffic(2 * states * gpus / model.layers if gpus > 1 else 0.0)
        case Division.D2D:
            return LayerTraffic(experts * others)
        case Division.H2D:
            return LayerTraffic(host=experts)
        case Division.HYBRID:
            return LayerTraffic(on_device * experts * others, (1 - on_device) * experts)
        case Division.PAPERS_HYBRID:
            return LayerTraffic(experts * others, experts / gpus)


def weight_bytes(division: Division, model: Model, gpus: int, on_device: float = 0.5) -> float:
    """Return the bytes of weights that one GPU keeps.

    Args:
        on_device: as for :func:`layer_traffic`.
    """
    experts, layers = model.expert_bytes, model.layers
    dense = model.weight_bytes - layers * experts
    at_hand = dense + _LAYERS_AT_HAND * experts
    match division:
        case Division.DP_DP:
            return dense + layers * experts
        case Division.DP_TP | Division.DP_EP:
            return dense + layers * experts / gpus
        case Division.TP_TP | Division.TP_EP | Division.PP:
            return (dense + layers * experts) / gpus
        case Division.D2D:
            return at_hand + (layers - 1) * experts / gpus
        case Division.H2D:
            return at_hand
        case Division.HYBRID:
            return at_hand + (layers - 1) * on_device * experts / gpus
        case Division.PAPERS_HYBRID:  # A window of as many layers, each divided by the GPUs.
            return at_hand + _LAYERS_AT_HAND * experts / gpus
