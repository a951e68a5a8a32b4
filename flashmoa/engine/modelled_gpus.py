"""Let engines on a CPU take the time of a GPU that is modelled, and check that they could."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from flashmoa.engine.refusals import translate_errors
from flashmoa.errors import EngineError

# A run in which a larger share of the GPU's time was overrun is no measurement.
TOLERATED_SHARE = 0.01


class MachineTooSlow(EngineError):
    """Raised when forwards took longer than on the modelled GPU, so that nothing was measured."""


def environment_of(
    gpu: str,
    model: str,
    tensor_parallel: int = 1,
    slowdown: float = 1.0,
    weights: str = "bfloat16",
) -> dict[str, str]:
    """Return the environment of an engine that takes the time of this GPU."""
    return {
        "FLASHMOA_DEVICE": gpu,
        "FLASHMOA_DEVICE_MODEL": model,
        "FLASHMOA_DEVICE_TP": str(tensor_parallel),
        "FLASHMOA_DEVICE_SLOWDOWN": str(slowdown),
        "FLASHMOA_DEVICE_WEIGHTS": weights,
    }


async def read_device(url: str) -> dict[str, Any] | None:
    """Return what an engine says of its modelled GPU: name, forwards, overruns and times.

    Return ``None`` if it has none.

    Raises: EngineUnreachable or EngineTimeout if it does not answer.
    """
    # As a rule the engine is on this machine, which no proxy reaches.
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        with translate_errors(url):
            answer = await http.get(f"{url}/server_info")
        try:
            states: list[dict[str, Any]] = answer.json().get("internal_states") or [{}]
        except ValueError:
            return None
    return states[0].get("modelled_gpu")


def counted_since(before: Mapping[str, Any], device: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an engine says of its modelled GPU, with counts since it was asked ``before``."""
    counts = ("forwards", "overruns", "device_seconds", "overrun_seconds", "starved_seconds")
    return {**device, **{name: device[name] - before[name] for name in counts}}


def overrun_share(device: Mapping[str, Any]) -> float:
    """Return the share of a GPU's time by which forwards were computed too late."""
    return device["overrun_seconds"] / max(device["device_seconds"], 1e-9)


def check_keeps_up(devices: Mapping[str, Mapping[str, Any]], option: str) -> None:
    """Check that forwards were computed within the time of the modelled GPUs.

    Args:
        devices: what the engines said of them, by the engines' names.
        option: the command's option for a slowdown.

    Raises: MachineTooSlow if more than 1 % of a GPU's time was overrun; the message proposes a
        slowdown.
    """
    for name, device in devices.items():
        share = overrun_share(device)
        if share > TOLERATED_SHARE:
            raise MachineTooSlow(
                f"this machine is too slow for {device['name']}: the engine {name} computed "
                f"{device['overruns']} of {device['forwards']} forwards too late, {share:.1%} of "
                f"the GPU's time; at most {TOLERATED_SHARE:.0%} is a measurement. "
                f"Give {option} {2 * device['slowdown']:g}, or run nothing else here."
            )
