"""Patches with which SGLang on a CPU does not ask for pinned memory."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


_CREATION_FUNCTIONS = {"tensor", "zeros", "empty", "arange"}


class UnpinnedTorch(ModuleType):
    """Replaces ``torch`` in modules that ask for pinned memory on any device."""

    def __getattr__(self, name: str) -> Any:
        import torch

        attribute = getattr(torch, name)
        return _ignore_pinning(attribute) if name in _CREATION_FUNCTIONS else attribute


def _ignore_pinning(original: Any) -> Any:
    def create(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return original(*args, **options)

    return create


def skip_pinning(tensor: Tensor, _device: object = None) -> Tensor:
    """Return the tensor unchanged; replaces ``Tensor.pin_memory``."""
    return tensor
