"""The experts of one layer: their tensors, their layout in a slot, their storage on the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from flashmoa_sglang.asyncep.cuda import pinned_memory

# Kernels may require that a weight's address is a multiple of this.
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Place:
    """Layout of a tensor in memory: from byte ``offset`` on, with the ``strides`` of the original.

    Kernels expect the strides that a tensor had when its weights were processed.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Number of bytes from the first element to the last, with gaps."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return self.dtype.itemsize * (last + 1)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor in a piece of memory (uint8)."""
        flat = memory[self.offset : self.offset + self.bytes].view(self.dtype)
        return flat.as_strided(self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class Packing:
    """Layout of several named tensors in one piece of memory that has ``bytes`` bytes."""

    places: Mapping[str, Place]
    bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Packing:
        """Lay tensors out one after another.

        Raises: ValueError if two elements of a tensor share memory.
        """
        places: dict[str, Place] = {}
        end = 0
        for name, tensor in tensors.items():
            _check_no_overlap(name, tensor)
            places[name] = Place(end, tensor.dtype, tuple(tensor.shape), tensor.stride())
            end += -(-places[name].bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(places, end)

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors in a piece of memory that has at least ``bytes`` bytes."""
        return {name: place.view(memory) for name, place in self.places.items()}

    def fill(self, memory: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors into a piece of memory."""
        for name, view in self.views(memory).items():
            view.copy_(tensors[name])


def _check_no_overlap(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError if two elements of a tensor may have the same place in memory."""
    last = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= last:
            raise ValueError(
                f"{name} has elements twice in memory: {tuple(tensor.shape)}, {tensor.stride()}"
            )
        last += (size - 1) * step


# A quantisation keeps at least one bit of sixteen.
_LEAST_REPACKED = 16
# Bytes in one copy. Other copies to the device wait only for the current piece, not for a layer.
_PIECE = 64 << 20


class Experts:
    """The tensors of a ``FusedMoE`` layer of SGLang that have a row for each expert.

    They are the weights, and whatever a quantisation adds (scales, zero points, biases).
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.device: torch.device = next(layer.parameters()).device
        # Sizes in bytes of the weights that SGLang will load, by name.
        self._weight_sizes: dict[str, int] = {}

    def move_to_host(self) -> None:
        """Move the parameters to host memory before their weights are loaded."""
        for name, parameter in self.layer.named_parameters(recurse=False):
            parameter.data = parameter.data.to("cpu")
            # Lazy parameters have no size before they are loaded.
            if not is_lazy(parameter):
                self._weight_sizes[name] = parameter.nbytes

    def are_missing(self) -> bool:
        """Return whether most of the loaded weights are no longer tensors of the layer.

        A quantisation may have put them elsewhere. Weights that it has repacked are still in the
        layer, perhaps under other names and in a fraction of the bytes.
        """
        tensors = self.tensors()
        missing = sum(size for name, size in self._weight_sizes.items() if name not in tensors)
        new = sum(t.nbytes for name, t in tensors.items() if name not in self._weight_sizes)
        return 2 * missing > sum(self._weight_sizes.values()) and _LEAST_REPACKED * new < missing

    def return_shared_tensors(self) -> None:
        """Move tensors that do not belong to single experts back to the device.

        They are scales of single experts when the layer is created; a quantisation makes one scale
        for all of them once the weights are loaded.
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
        """Put these tensors into the layer, which then computes with them."""
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


class StoredBytes(NamedTuple):
    """How many bytes of a layer's experts are stored where, apart from slots.

    ``on_host``: in this process. ``share``: the part that this replica stores for all replicas.
    ``at_peers``: the parts that the other replicas store.
    """

    on_host: int = 0
    share: int = 0
    at_peers: int = 0


class ExpertSource(ABC):
    """Copies the experts of one layer into a slot, where they are laid out as in ``packing``."""

    experts: Experts
    packing: Packing
    stored: StoredBytes

    @abstractmethod
    def fill(self, memory: torch.Tensor) -> None:
        """Copy the experts into a slot's memory; with CUDA, enqueue that on the current stream."""


class HostExperts(ExpertSource):
    """Experts packed into one piece of host memory, which is pinned if a GPU copies from it."""

    def __init__(self, experts: Experts) -> None:
        self.experts = experts
        tensors = experts.tensors()
        self.packing = Packing.of(tensors)
        size = self.packing.bytes
        on_gpu = experts.device.type == "cuda"
        self._memory = pinned_memory(size) if on_gpu else torch.empty(size, dtype=torch.uint8)
        self.packing.fill(self._memory, tensors)
        self.stored = StoredBytes(on_host=self.packing.bytes)
        # This frees the layer's own tensors.
        experts.bind(self.packing.views(self._memory))

    def fill(self, memory: torch.Tensor) -> None:
        pieces = memory[: self.packing.bytes].split(_PIECE)
        for piece, source in zip(pieces, self._memory.split(_PIECE), strict=True):
            piece.copy_(source, non_blocking=True)


def store_on_host(layers: Sequence[Experts]) -> list[ExpertSource]:
    """Store the experts of these layers in this process's host memory."""
    return [HostExperts(experts) for experts in layers]
