"""KV on its way from a prefill engine to a decode engine where both are CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def use_host_memory(
    original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any
) -> None:
    """Around ``Scheduler.init_disaggregation``: the KV pool is in host memory, for nixl too.

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
