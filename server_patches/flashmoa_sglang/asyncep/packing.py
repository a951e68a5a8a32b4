"""Tensors of one layer in one piece of memory, so that one copy moves all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

# What kernels may expect of a weight's address.
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: from byte ``offset`` on, its dimensions in memory ``order``."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in a piece of memory (uint8)."""
        flat = memory[self.offset : self.offset + self.bytes].view(self.dtype)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return flat.view([self.shape[dimension] for dimension in self.order]).permute(inverse)


@dataclass(frozen=True, slots=True)
class Packing:
    """How named tensors lie in one piece of memory of so many ``bytes``."""

    places: Mapping[str, Place]
    bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Packing:
        """Raises: ValueError for a tensor that has gaps in memory, or one element twice."""
        places: dict[str, Place] = {}
        end = 0
        for name, tensor in tensors.items():
            places[name] = Place(end, tensor.dtype, tuple(tensor.shape), _order(name, tensor))
            end += -(-places[name].bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(places, end)

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in a piece of memory that has at least so many bytes."""
        return {name: place.view(memory) for name, place in self.places.items()}

    def fill(self, memory: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put the tensors in."""
        for name, view in self.views(memory).items():
            view.copy_(tensors[name])


def _order(name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions from the one with the largest stride on."""
    order = sorted(range(tensor.dim()), key=lambda at: (-tensor.stride(at), -tensor.shape[at]))
    if not tensor.permute(order).is_contiguous():
        raise ValueError(f"{name} is not dense in memory: {tensor.shape}, {tensor.stride()}")
    return tuple(order)
