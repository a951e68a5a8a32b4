"""Patches that let the engines of a PD pair run on a CPU, and sleep while they wait.

On a GPU, SGLang and nixl keep a core busy each while they wait for KV. Here all engines share the
cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any


def prepare_pd_pairs(server_args: Any) -> None:
    """Patch this process if it is a scheduler of a PD pair."""
    if server_args.disaggregation_mode in (None, "null"):
        return
    _patch_scheduler()
    if server_args.disaggregation_transfer_backend == "nixl":
        _patch_nixl()


@cache
def _patch_scheduler() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    scheduler_class: Any = Scheduler
    scheduler_class.on_idle = _sleep_if_busy(Scheduler.on_idle)


def _sleep_if_busy(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``Scheduler.on_idle``, which SGLang calls in each step without a batch.

    SGLang sleeps there only if the engine has no request. While a request awaits KV, it polls
    without a pause.
    """

    @wraps(original)
    def on_idle(scheduler: Any) -> None:
        original(scheduler)
        if not scheduler.is_fully_idle():
            # Short compared with a decode step, and long compared with a poll.
            time.sleep(0.0005)

    return on_idle


@cache
def _patch_nixl() -> None:
    """Let nixl register the KV pool as host memory, and wait for events instead of polling.

    SGLang registers the pool as "VRAM", so this name is made to mean host memory. Mooncake, the
    other transfer backend, recognises host memory by its address.
    """
    try:
        api: Any = import_module("nixl._api")
    except ImportError:
        return  # SGLang reports that nixl is missing.
    api.nixl_agent.__init__ = _use_dram_for_vram(api.nixl_agent.__init__)
    api.nixlBind.nixlAgent = _wait_for_events(api.nixlBind.nixlAgent)


def _use_dram_for_vram(original: Callable[..., None]) -> Callable[..., None]:
    def init(agent: Any, *args: Any, **kwargs: Any) -> None:
        original(agent, *args, **kwargs)
        agent.nixl_mems["VRAM"] = agent.nixl_mems["DRAM"]

    return init


def _wait_for_events(original: Callable[..., Any]) -> Callable[..., Any]:
    def make_agent(name: str, agent_config: Any) -> Any:
        # Microseconds. An event wakes nixl's thread at once.
        agent_config.pthrDelay = 1000
        return original(name, agent_config)

    return make_agent
