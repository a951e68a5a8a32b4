"""Copies of experts in an engine that takes a modelled GPU's time (``--flashmoa-asyncep``)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from flashmoa_sglang.sglang.options import Options

from flashmoa_bench.modelled_gpu.expert_parallelism import Division, weight_bytes
from flashmoa_bench.modelled_gpu.gpu import Model, ModelledGpu, modelled_gpu
from flashmoa_bench.modelled_gpu.hash_model import EXPERTS_ARCHITECTURE, LAYER_BYTES
from flashmoa_bench.modelled_gpu.virtual_gpu import Bandwidths, VirtualGpu

_DIVISIONS = {"h2d": Division.H2D, "d2d": Division.D2D, "hybrid": Division.HYBRID}


@cache
def virtual_gpu() -> VirtualGpu | None:
    """Return the GPU of this process's copies; ``None`` if its engine copies no experts.

    Raises: ValueError if the GPU, the model or its times are unknown.
    """
    options, modelled = Options.from_environment(), modelled_gpu()
    if modelled is None or options.asyncep == "off":
        return None
    rank = 0 if options.asyncep == "h2d" else options.replica()[0]
    return VirtualGpu(_bandwidths(modelled), f"GPU-{rank}")


def _bandwidths(modelled: ModelledGpu) -> Bandwidths:
    scale = modelled.model.expert_bytes / LAYER_BYTES
    return Bandwidths.of(modelled.gpu, scale * modelled.slowdown)


def resident_bytes(model: Model) -> float:
    """Return the bytes of weights that stay on the GPU of this process's engine."""
    options = Options.from_environment()
    if options.asyncep == "off":
        return model.weight_bytes
    replicas = 1 if options.asyncep == "h2d" else options.replica()[1]
    return weight_bytes(_DIVISIONS[options.asyncep], model, replicas, options.on_device())


def check_model(folder: str) -> None:
    """Check that an engine that copies experts serves a model whose copies take time.

    Raises: ValueError if it serves another one.
    """
    if Options.from_environment().asyncep == "off":
        return
    config = Path(folder) / "config.json"
    if EXPERTS_ARCHITECTURE not in json.loads(config.read_text()).get("architectures", ()):
        raise ValueError(
            "--flashmoa-asyncep with --flashmoa-device needs --model-path "
            "hash-experts:TOKENIZER_FOLDER: other models' layers take no modelled time."
        )
