"""Give engines the time of the GPUs that a command line names, and check that they keep it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from flashmoa.engine import EngineClient
from flashmoa.engine.refusals import translate_errors
from flashmoa.errors import EngineError

SLOWDOWN_OPTION = "--device-slowdown"
# Share of a GPU's time; a run with more overrun is no measurement.
TOLERATED_SHARE = 0.01


def add_device_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "engines on this CPU in the time of a GPU (docs/modelled-gpus.md)"
    )
    group.add_argument("--device", metavar="GPU", help="such as h200_sxm, h100_sxm or a100_sxm")
    group.add_argument(
        "--device-model",
        nargs="+",
        default=["Qwen/Qwen3-32B"],
        metavar="NAME",
        help="model whose times are taken (default: Qwen/Qwen3-32B); with several models, "
        "ENGINE=NAME for each; all engines of this name have the same one, stock or not",
    )
    group.add_argument(
        "--device-tp", type=int, default=1, metavar="N", help="GPUs that one engine runs on"
    )
    group.add_argument(
        "--device-weights",
        choices=("bfloat16", "fp8", "fp8_block"),
        default="bfloat16",
        help="precision of the weights",
    )
    group.add_argument(
        SLOWDOWN_OPTION,
        type=slowdown,
        default=1.0,
        metavar="K",
        help="factor of all times of the GPU, for a machine that does not keep up; at least 1",
    )


def slowdown(text: str) -> float:
    """Parse a factor of at least 1. Raises: argparse.ArgumentTypeError for other factors.

    A faster GPU would shorten a run, but not the time that HTTP takes between arrivals. So other
    requests would meet in a batch.
    """
    factor = float(text)
    if factor < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return factor


def device_environment(arguments: argparse.Namespace, engine: str) -> dict[str, str]:
    """Return the environment of an engine on the modelled GPU; empty without ``--device``.

    Raises: EngineError if ``--device-model`` names no model for this engine.
    """
    if not getattr(arguments, "device", None):
        return {}
    return environment_of(
        arguments.device,
        model_of(engine, arguments.device_model),
        arguments.device_tp,
        arguments.device_slowdown,
        arguments.device_weights,
    )


def model_of(engine: str, names: Sequence[str]) -> str:
    """Return the model whose times an engine takes, by ``--device-model``.

    ``stock_NAME``, ``sjf_NAME`` and ``NAME_2``, a second engine for data parallelism, have the
    model of ``NAME``.

    Raises: EngineError if there is none.
    """
    engine = engine.removeprefix("stock_").removeprefix("sjf_").removesuffix("_2")
    for_all = [name for name in names if "=" not in name]
    own = [name.partition("=")[2] for name in names if name.startswith(f"{engine}=")]
    if chosen := own or for_all:
        return chosen[-1]
    raise EngineError(
        f"--device-model {' '.join(names)} names no model for the engine {engine}: add "
        f"{engine}=NAME, or a NAME for all others"
    )


def common_slowdown(devices: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the GPUs' common slowdown; 1 without GPUs.

    Raises: EngineError if the factors differ.
    """
    factors = {name: float(device["slowdown"]) for name, device in devices.items()}
    if len(set(factors.values())) > 1:
        raise EngineError(
            f"the engines' modelled GPUs are slowed down by different factors, {factors}: start "
            "all of them with the same --flashmoa-device-slowdown"
        )
    return next(iter(factors.values()), 1.0)


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


async def read_server(url: str) -> dict[str, Any]:
    """Return an SGLang server's settings and states; empty if it reports none.

    Raises: EngineUnreachable or EngineTimeout if it does not answer.
    """
    # As a rule the engine is on this machine, which no proxy reaches.
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        with translate_errors(url):
            answer = await http.get(f"{url}/server_info")
        try:
            return answer.json() if answer.is_success else {}
        except ValueError:
            return {}


def device_of(server: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a server's report of its modelled GPU (name, counts, times); ``None`` without one."""
    states: list[dict[str, Any]] = server.get("internal_states") or [{}]
    return states[0].get("modelled_gpu")


async def read_device(url: str) -> dict[str, Any] | None:
    """Return :func:`device_of` an engine. Raises: EngineError as :func:`read_server`."""
    return device_of(await read_server(url))


async def read_devices(engines: Mapping[str, EngineClient]) -> dict[str, dict[str, Any]]:
    """Return the reports of the engines that have modelled GPUs, by the engines' names."""
    read = {name: await read_device(engine.url) for name, engine in engines.items()}
    return {name: device for name, device in read.items() if device}


def counted_since(before: Mapping[str, Any], device: Mapping[str, Any]) -> dict[str, Any]:
    """Return an engine's report with counts since the report ``before``."""
    counts = ("forwards", "overruns", "device_seconds", "overrun_seconds", "starved_seconds")
    return {**device, **{name: device[name] - before[name] for name in counts}}


def overrun_share(device: Mapping[str, Any]) -> float:
    """Return the sum of forwards' delays over the GPU's time."""
    return device["overrun_seconds"] / max(device["device_seconds"], 1e-9)


def worst_overrun(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> float:
    """Return the largest :func:`overrun_share` of a GPU between two readings."""
    during = [counted_since(before[name], device) for name, device in after.items()]
    return max(map(overrun_share, during), default=0.0)


def check_keeps_up(devices: Mapping[str, Mapping[str, Any]], option: str) -> None:
    """Check that forwards were computed within the time of the modelled GPUs.

    Args:
        devices: the engines' reports, by name.
        option: the command's option for a slowdown.

    Raises: EngineError if more than 1 % of a GPU's time was overrun; it proposes a slowdown.
    """
    for name, device in devices.items():
        share = overrun_share(device)
        if share > TOLERATED_SHARE:
            raise EngineError(
                f"this machine is too slow for {device['name']}: the engine {name} computed "
                f"{device['overruns']} of {device['forwards']} forwards too late, {share:.1%} of "
                f"the GPU's time; at most {TOLERATED_SHARE:.0%} is a measurement. "
                f"Give {option} {2 * device['slowdown']:g}, or run nothing else here."
            )
