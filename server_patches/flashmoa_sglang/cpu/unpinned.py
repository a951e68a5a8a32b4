"""``torch`` as SGLang's modules can have it on a CPU, where there is no pinned memory."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_MAKERS = {"tensor", "zeros", "empty", "arange"}


class Unpinned(ModuleType):
    """Stands for ``torch`` in a module that asks for pinned memory without a look at the device."""

    def __getattr__(self, name: str) -> Any:
        import torch

        found = getattr(torch, name)
        return _without_pinning(found) if name in _MAKERS else found


def _without_pinning(make: Any) -> Any:
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return make(*args, **options)

    return made


def as_it_is(tensor: Tensor, _device: object = None) -> Tensor:
    """In place of ``Tensor.pin_memory``."""
    return tensor
