"""Run the plugin's real offloader of experts in modelled time, without an engine.

The layers compute nothing and take a modelled layer's time. Slots, streams, events, shares and
their exchange between replicas are the plugin's own code.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from flashmoa_sglang.moe.asyncep.experts import store_on_host
from flashmoa_sglang.moe.asyncep.offloader import ExpertOffloader, Store
from flashmoa_sglang.moe.asyncep.replicas import Replica, ShareExchange, share_experts
from flashmoa_sglang.moe.saturation import LayerTimes

from flashmoa_bench.modelled_gpu.expert_parallelism import Division
from flashmoa_bench.modelled_gpu.gpu import Gpu, LayerSeconds, Model
from flashmoa_bench.modelled_gpu.hash_model import EXPERTS, LAYER_BYTES
from flashmoa_bench.modelled_gpu.virtual_gpu import Bandwidths, VirtualGpu

_GROUPS = count()


class TimedLayer(torch.nn.Module):
    """A layer whose experts all have the layer's number as weights."""

    num_local_experts = EXPERTS

    def __init__(self, gpu: VirtualGpu, number: int) -> None:
        super().__init__()
        self._gpu, self._number = gpu, number
        weights = torch.full((EXPERTS, LAYER_BYTES // (4 * EXPERTS)), float(number))
        self.weight = torch.nn.Parameter(weights, requires_grad=False)

    def compute(self) -> bool:
        """Take the time of experts; return whether the weights were this layer's."""
        self._gpu.compute_experts([self.weight.data])
        return bool(self.weight.eq(self._number).all())


class OffloadedModel:
    """One replica of a model with experts, on a virtual GPU.

    Args: gpu: its bandwidths are for layers of ``LAYER_BYTES``.

    Attributes:
        stale: number of layers that computed with other bytes than their experts.
    """

    def __init__(self, gpu: VirtualGpu, layers: int, slots: int, store: Store) -> None:
        self.gpu = gpu
        self.stale = 0
        self._layers = [TimedLayer(gpu, number) for number in range(layers)]
        has_its_methods: Any = gpu
        self.offloader = ExpertOffloader(
            TimedLayer, "compute", slots, store, open_gpu=lambda _device: has_its_methods
        )
        self.offloader.wrap_modules(iter(self._layers))
        self.offloader.post_init()

    def forward(self, seconds: LayerSeconds) -> float:
        """Enqueue a forward; return its seconds."""
        begin = self.gpu.now
        self.gpu.begin(seconds)
        for layer in self._layers:
            self.gpu.compute_others()
            self.stale += not layer.compute()
        return self.gpu.now - begin

    def seconds(self, *forwards: LayerSeconds) -> float:
        """Return the seconds of forwards that follow others like the first one.

        Raises: AssertionError if a layer computed with bytes that were not its experts.
        """
        self.forward(forwards[0])
        self.forward(forwards[0])
        seconds = sum(map(self.forward, forwards))
        assert not self.stale and not self.gpu.races, (self.stale, self.gpu.races)
        return seconds

    def time_layers(self, tokens: int, seconds: LayerSeconds) -> LayerTimes:
        """Return the times that the offloader measures in a forward of ``tokens`` tokens."""
        self.offloader.time_next(tokens)
        self.forward(seconds)
        times = self.offloader.take_times()
        assert times is not None
        return times


@contextmanager
def offloaded(
    way: Division, model: Model, gpu: Gpu, replicas: int, *, on_device: float = 0.5, slots: int = 2
) -> Generator[OffloadedModel]:
    """Start the replicas of a model, and yield one of them; all are alike.

    Args:
        way: ``H2D``, whose replicas have nothing in common, ``D2D`` or ``HYBRID``.
        on_device: share of the experts that ``HYBRID`` keeps on the GPUs.
    """
    bandwidths = Bandwidths.of(gpu, model.expert_bytes / LAYER_BYTES)
    make = partial(OffloadedModel, layers=model.layers, slots=slots)
    if way is Division.H2D:
        yield make(VirtualGpu(bandwidths), store=store_on_host)
        return
    group = f"modelled-{os.getpid()}-{next(_GROUPS)}"
    exchanges = [ShareExchange(Replica(group, rank, replicas)) for rank in range(replicas)]
    share = 1.0 if way is Division.D2D else on_device
    stores: Iterable[Store] = [
        partial(share_experts, exchange=exchange, on_device=share, wait=60.0)
        for exchange in exchanges
    ]
    gpus = [VirtualGpu(bandwidths, f"GPU-{rank}") for rank in range(replicas)]
    try:
        # Each replica waits for the others' shares.
        with ThreadPoolExecutor(replicas) as pool:
            started = [
                pool.submit(make, one, store=store) for one, store in zip(gpus, stores, strict=True)
            ]
            first, *_ = [future.result() for future in started]
        yield first
    finally:
        for exchange in exchanges:
            exchange.close()
