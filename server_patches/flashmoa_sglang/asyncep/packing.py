"""Tensors of one layer in one piece of memory, so that one copy moves all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

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
        """The tensor in a piece of memory (uint8)."""
        flat = memory[self.offset : self.offset + self.bytes].view(self.dtype)
        return flat.as_strided(self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class Packing:
    """How named tensors lie in one piece of memory of so many ``bytes``."""

    places: Mapping[str, Place]
    bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Packing:
        """Raises: ValueError for a tensor of which two elements are one in memory."""
        places: dict[str, Place] = {}
        end = 0
        for name, tensor in tensors.items():
            _check(name, tensor)
            places[name] = Place(end, tensor.dtype, tuple(tensor.shape), tensor.stride())
            end += -(-places[name].bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(places, end)

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in a piece of memory that has at least so many bytes."""
        return {name: place.view(memory) for name, place in self.places.items()}

    def fill(self, memory: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put the tensors in."""
        for name, view in self.views(memory).items():
            view.copy_(tensors[name])


def _check(name: str, tensor: torch.Tensor) -> None:
    """Raises: ValueError where two elements may be one in memory."""
    last = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= last:
            raise ValueError(
                f"{name} has elements twice in memory: {tuple(tensor.shape)}, {tensor.stride()}"
            )
        last += (size - 1) * step
