"""Patches with which SGLang on a CPU uses host memory, and does not ask for pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def use_host_memory(server_args: Any) -> None:
    """Let an engine of a PD pair register its KV pool with nixl as host memory.

    SGLang registers the pool with nixl as "VRAM", so this name is made to mean host memory. The
    other backend, Mooncake, finds out from the pool's address.
    """
    is_one_of_a_pair = server_args.disaggregation_mode not in (None, "null")
    if not is_one_of_a_pair or server_args.disaggregation_transfer_backend != "nixl":
        return
    try:
        from nixl._api import nixl_agent
    except ImportError:
        return  # SGLang reports that nixl is missing.
    nixl_agent.__init__ = _use_dram_for_vram(nixl_agent.__init__)


def _use_dram_for_vram(original: Callable[..., None]) -> Callable[..., None]:
    def init(agent: Any, *args: Any, **kwargs: Any) -> None:
        original(agent, *args, **kwargs)
        agent.nixl_mems["VRAM"] = agent.nixl_mems["DRAM"]

    return init


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
