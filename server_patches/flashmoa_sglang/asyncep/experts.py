"""The experts of one layer: their tensors, where they are kept, and how they lie in a slot."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

# What kernels may expect of a weight's address.
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: from byte ``offset`` on, with the ``strides`` that kernels expect."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """From its first element to its last, with what lies between them."""
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
    """How named tensors lie in one piece of memory of so many ``bytes``."""

    places: Mapping[str, Place]
    bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Packing:
        """Place tensors one behind another. Raises: ValueError where two elements share memory."""
        places: dict[str, Place] = {}
        end = 0
        for name, tensor in tensors.items():
            _check(name, tensor)
            places[name] = Place(end, tensor.dtype, tuple(tensor.shape), tensor.stride())
            end += -(-places[name].bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(places, end)

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors in a piece of memory that has at least so many bytes."""
        return {name: place.view(memory) for name, place in self.places.items()}

    def fill(self, memory: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put the tensors in."""
        for name, view in self.views(memory).items():
            view.copy_(tensors[name])


def _check(name: str, tensor: torch.Tensor) -> None:
    """Check that no two elements may be one in memory. Raises: ValueError."""
    last = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= last:
            raise ValueError(
                f"{name} has elements twice in memory: {tuple(tensor.shape)}, {tensor.stride()}"
            )
        last += (size - 1) * step


def pinned(size: int) -> torch.Tensor:
    """Pin ``size`` bytes (uint8); torch's own pinned memory comes in powers of two.

    Raises: SystemExit where CUDA does not pin them; it leaves an error behind that torch would
        find at its next kernel, so that there is no other way to go on.
    """
    # Shared and populated, so that the pages which are pinned are those that are written to later.
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    memory = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
    cudart: Any = torch.cuda.cudart()
    code = cudart.cudaHostRegister(memory.data_ptr(), size, 0)
    if int(code) != 0:
        raise SystemExit(
            f"--flashmoa-asyncep h2d: CUDA does not pin {size} bytes of host memory "
            f"({cudart.cudaGetErrorString(code)}). The host needs memory for all experts but the "
            "first layer's, and the container a limit on locked memory (ulimit -l) that allows it."
        )
    return memory


# No quantisation needs less than one bit of sixteen.
_LEAST_REPACKED = 16
# Bytes of one copy: other copies to the device wait for the end of one, and not for a whole layer.
_PIECE = 64 << 20


class Experts:
    """What a ``FusedMoE`` layer of SGLang computes with, expert by expert.

    Every tensor with a row for each expert belongs to them: weights, and whatever a quantisation
    has beside them (scales, zero points, biases).
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.device: torch.device = next(layer.parameters()).device
        # Bytes of what is to be loaded, by name.
        self._expected: dict[str, int] = {}

    def leave_device(self) -> None:
        """Have the weights, which are not loaded yet, loaded into host memory."""
        for name, parameter in self.layer.named_parameters(recurse=False):
            parameter.data = parameter.data.to("cpu")
            # Some have no size before they are loaded.
            if not is_lazy(parameter):
                self._expected[name] = parameter.nbytes

    def are_gone(self) -> bool:
        """Return whether most of the loaded weights are not the layer's tensors any more.

        A quantisation may have put them elsewhere, and nothing in their place. Repacked ones are
        there, under their names or others, if only in a fraction of the bytes.
        """
        there = self.tensors()
        gone = sum(size for name, size in self._expected.items() if name not in there)
        new = sum(t.nbytes for name, t in there.items() if name not in self._expected)
        return 2 * gone > sum(self._expected.values()) and _LEAST_REPACKED * new < gone

    def return_rest(self) -> None:
        """Put the loaded tensors that do not belong to single experts on the device.

        It left with the rest, before a quantisation made one scale for all of several.
        """
        layer, of_experts = self.layer, self.tensors()
        rest = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        self.bind({name: t.data.to(self.device) for name, t in rest if name not in of_experts})

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, once the weights are loaded and processed."""
        layer = self.layer
        found: dict[str, torch.Tensor] = {}
        for kind in (layer._parameters, layer._buffers, vars(layer)):
            for name, tensor in kind.items():
                if isinstance(tensor, torch.Tensor) and name not in found:
                    found[name] = tensor.data
        count = layer.num_local_experts
        return {
            name: tensor
            for name, tensor in sorted(found.items())
            if tensor.dim() > 0 and tensor.shape[0] == count
        }

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have the layer compute with these."""
        for name, tensor in tensors.items():
            parameter = self.layer._parameters.get(name)
            if parameter is not None:
                parameter.data = tensor
            elif name in self.layer._buffers:
                self.layer._buffers[name] = tensor
            else:
                setattr(self.layer, name, tensor)

    def give_back(self) -> None:
        """Free the loaded tensors; only their shapes are left until others are bound."""
        self.bind({name: t.new_empty(()).expand(t.shape) for name, t in self.tensors().items()})


class Kept(NamedTuple):
    """Where a layer's experts are while no slot has them, in bytes.

    ``share``: what this replica holds for all; ``at_peers``: what the others hold.
    """

    on_host: int = 0
    share: int = 0
    at_peers: int = 0


class ExpertSource(ABC):
    """Where the experts of one layer come from, and how they lie in a slot."""

    experts: Experts
    packing: Packing
    kept: Kept

    @abstractmethod
    def fill(self, memory: torch.Tensor) -> None:
        """Begin to copy them into a slot, on the current stream of a device that has streams."""


class HostExperts(ExpertSource):
    """Experts packed into one piece of host memory; pinned where a GPU is to copy it."""

    def __init__(self, experts: Experts) -> None:
        self.experts = experts
        tensors = experts.tensors()
        self.packing = Packing.of(tensors)
        size = self.packing.bytes
        on_gpu = experts.device.type == "cuda"
        self._memory = pinned(size) if on_gpu else torch.empty(size, dtype=torch.uint8)
        self.packing.fill(self._memory, tensors)
        self.kept = Kept(on_host=self.packing.bytes)
        # The layer's own tensors are not needed any more.
        experts.bind(self.packing.views(self._memory))

    def fill(self, memory: torch.Tensor) -> None:
        pieces = memory[: self.packing.bytes].split(_PIECE)
        for piece, kept in zip(pieces, self._memory.split(_PIECE), strict=True):
            piece.copy_(kept, non_blocking=True)


def in_host_memory(layers: Sequence[Experts]) -> list[ExpertSource]:
    """Keep the experts of these layers in this process's host memory."""
    return [HostExperts(experts) for experts in layers]
