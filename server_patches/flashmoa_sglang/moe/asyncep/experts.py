"""A layer's experts: their tensors, their layout in a slot, and where they are stored.

It also finds out how much memory the host has left for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn.parameter import is_lazy

from flashmoa_sglang.moe.asyncep.cuda import CudaDevice

# Kernels may require that a weight's address is a multiple of this.
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Place:
    """Layout of a tensor in memory: from byte ``offset`` on, with the ``strides`` of the original.

    Kernels expect the strides that a tensor had when its weights were processed.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[self.offset :].view(self.dtype).as_strided(self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class Packing:
    """Layout of several named tensors in one piece of memory of ``bytes`` bytes."""

    places: Mapping[str, Place]
    bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Packing:
        """Lay tensors out one after another.

        Raises: ValueError if two elements of a tensor may have the same place in memory.
        """
        places: dict[str, Place] = {}
        end = 0
        for name, tensor in tensors.items():
            # Index of the last element in memory, with gaps.
            last = 0
            for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
                if size > 1 and step <= last:
                    shape = f"{tuple(tensor.shape)}, {tensor.stride()}"
                    raise ValueError(f"{name} has elements twice in memory: {shape}")
                last += (size - 1) * step
            places[name] = Place(end, tensor.dtype, tuple(tensor.shape), tensor.stride())
            if tensor.numel():
                end += -(-tensor.dtype.itemsize * (last + 1) // ALIGNMENT) * ALIGNMENT
        return cls(places, end)

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors in a piece of memory that has at least ``bytes`` bytes."""
        return {name: place.view(memory) for name, place in self.places.items()}

    def fill(self, memory: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, view in self.views(memory).items():
            view.copy_(tensors[name])


class Experts:
    """The tensors of a ``FusedMoE`` layer of SGLang that have a row for each expert.

    They are the weights, and the scales, zero points and biases that a quantisation adds.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.device: torch.device = next(layer.parameters()).device
        # Sizes in bytes of the weights that SGLang will load, by name.
        self._weight_sizes: dict[str, int] = {}

    def move_to_host(self) -> None:
        """Move the parameters to host memory before their weights are loaded.

        Raises: SystemExit if the host has no room for them twice, as they need it while they are
            packed. Otherwise the kernel would kill a process later.
        """
        size = 2 * sum(p.nbytes for p in self.layer.parameters(recurse=False) if not is_lazy(p))
        if size > (available := available_bytes()):
            raise SystemExit(
                f"--flashmoa-asyncep: the next layer's experts need {_gib(size)} of host "
                f"memory, but this machine or container has {_gib(available)} left. Give "
                "it more, take a checkpoint in FP8, or start without --flashmoa-asyncep on more "
                "GPUs (--tp-size)."
            )
        for name, parameter in self.layer.named_parameters(recurse=False):
            parameter.data = parameter.data.to("cpu")
            # Lazy parameters have no size before they are loaded.
            if not is_lazy(parameter):
                self._weight_sizes[name] = parameter.nbytes

    def are_missing(self) -> bool:
        """Return whether most of the loaded weights are no longer tensors of the layer.

        A quantisation may have put them elsewhere. Repacked weights are still in the layer, perhaps
        under other names and in a fraction of the bytes.
        """
        tensors = self.tensors()
        missing = sum(size for name, size in self._weight_sizes.items() if name not in tensors)
        new = sum(t.nbytes for name, t in tensors.items() if name not in self._weight_sizes)
        # A quantisation keeps at least one bit of sixteen.
        return 2 * missing > sum(self._weight_sizes.values()) and 16 * new < missing

    def return_shared_tensors(self) -> None:
        """Move tensors that do not belong to single experts back to the device.

        A new layer has a scale for each expert. Once the weights are loaded, a quantisation may
        make one scale for all experts.
        """
        layer, of_experts = self.layer, self.tensors()
        tensors = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        self.bind({name: t.data.to(self.device) for name, t in tensors if name not in of_experts})

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, once the weights are loaded and processed."""
        layer = self.layer
        tensors: dict[str, torch.Tensor] = {}
        for kind in (layer._parameters, layer._buffers, vars(layer)):
            for name, tensor in kind.items():
                if isinstance(tensor, torch.Tensor) and name not in tensors:
                    tensors[name] = tensor.data
        count = layer.num_local_experts
        return {
            name: tensor
            for name, tensor in sorted(tensors.items())
            if tensor.dim() > 0 and tensor.shape[0] == count
        }

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            parameter = self.layer._parameters.get(name)
            if parameter is not None:
                parameter.data = tensor
            elif name in self.layer._buffers:
                self.layer._buffers[name] = tensor
            else:
                setattr(self.layer, name, tensor)

    def free(self) -> None:
        """Free the tensors; placeholders keep their shapes until other tensors are bound."""
        self.bind({name: t.new_empty(()).expand(t.shape) for name, t in self.tensors().items()})


class Where(Enum):
    """Where bytes of experts are stored, apart from slots.

    ``ON_HOST``: in host memory. ``SHARE``: in this replica's memory on its device. ``AT_PEERS``: on
    the devices of the other replicas.
    """

    ON_HOST = "on_host"
    SHARE = "share"
    AT_PEERS = "at_peers"

    @property
    def channel(self) -> str:
        """The way to the device; copies on different ways run at the same time."""
        return "pcie" if self is Where.ON_HOST else "nvlink"


@dataclass(frozen=True, slots=True)
class Run:
    """The bytes of a layer's packed experts from ``start`` on, and the memory with them."""

    start: int
    memory: torch.Tensor
    where: Where


class PackedExperts:
    """A layer's experts, laid out as in a slot.

    Attributes:
        packing: the layout.
        runs: where its bytes are stored.
    """

    def __init__(self, experts: Experts, allocate: Callable[[int], torch.Tensor]) -> None:
        """Pack the loaded experts into host memory (uint8), and free their own tensors."""
        self.experts = experts
        tensors = experts.tensors()
        self.packing = Packing.of(tensors)
        memory = allocate(self.packing.bytes)
        self.packing.fill(memory, tensors)
        experts.bind(self.packing.views(memory))
        self.runs = [Run(0, memory, Where.ON_HOST)]

    @property
    def channels(self) -> set[str]:
        return {run.where.channel for run in self.runs}

    def copies(
        self, slot: torch.Tensor, channel: str
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the runs that come on this way: each run's place in a slot, and its bytes."""
        for run in self.runs:
            if run.where.channel == channel:
                yield slot[run.start : run.start + run.memory.nbytes], run.memory

    def free(self) -> None:
        """Free the packed experts, so that other runs can take their place."""
        self.experts.free()
        self.runs = []

    def stored(self, where: Where) -> int:
        return sum(run.memory.nbytes for run in self.runs if run.where is where)


def store_on_host(layers: Sequence[Experts], gpu: CudaDevice | None) -> list[PackedExperts]:
    """Store the layers' experts in host memory, pinned if a GPU copies from it."""
    return pack(layers, gpu, pinned=True)


def pack(layers: Sequence[Experts], gpu: CudaDevice | None, *, pinned: bool) -> list[PackedExperts]:
    allocate = gpu.pinned_memory if gpu and pinned else partial(torch.zeros, dtype=torch.uint8)
    packed: list[PackedExperts] = []
    for experts in layers:
        packed.append(PackedExperts(experts, allocate))
        if gpu is not None:
            gpu.free_host_cache()
    return packed


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory that the machine, or the container (cgroup v2) if less, has left."""
    # The kernel frees cached files and its own caches before it kills a process.
    reclaimable = ("inactive_file", "active_file", "slab_reclaimable")
    limits = [psutil.virtual_memory().available]
    try:
        path = (root / "proc/self/cgroup").read_text().partition("0::/")[2].strip()
    except OSError:
        return limits[0]
    top = root / "sys/fs/cgroup"
    folder = top / path
    for group in (folder, *folder.parents):
        if not group.is_relative_to(top):
            break
        try:
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            statistics = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
        except (OSError, ValueError):
            continue  # The group has no limit, or does not show it.
        limits.append(limit - used + sum(int(statistics.get(name, 0)) for name in reclaimable))
    return max(0, min(limits))
