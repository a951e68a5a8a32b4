"""Host memory in place of a GPU's, and never pinned: what SGLang's code is told of it on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def use_host_memory(
    original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any
) -> None:
    """Have nixl take the KV pool as host memory, around ``Scheduler.init_disaggregation``.

    SGLang registers it as a GPU's with nixl, by a name that means host memory from here on.
    Mooncake asks the pool's address.
    """
    if scheduler.server_args.disaggregation_transfer_backend == "nixl":
        try:
            from nixl._api import nixl_agent
        except ImportError:
            pass  # SGLang says what is missing, if it needs it.
        else:
            nixl_agent.__init__ = _in_host_memory(nixl_agent.__init__)
    original(scheduler, *args, **kwargs)


def _in_host_memory(usual: Callable[..., None]) -> Callable[..., None]:
    def init(agent: Any, *args: Any, **kwargs: Any) -> None:
        usual(agent, *args, **kwargs)
        agent.nixl_mems["VRAM"] = agent.nixl_mems["DRAM"]

    return init


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
    """Return the tensor as it is, in place of ``Tensor.pin_memory``."""
    return tensor
