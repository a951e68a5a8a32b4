"""Read which modelled GPU a benchmark's engines take the time of from its command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashmoa.engine.modelled_gpus import environment_of
from flashmoa.errors import EngineError

SLOWDOWN_OPTION = "--device-slowdown"


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--device`` and the options that belong to it."""
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
    group.add_argument(
        "--device-computes",
        choices=("hash", "shape"),
        default="hash",
        help="where tokens come from: a hash of the context, which is cheap, or the tiny model",
    )


def slowdown(text: str) -> float:
    """Parse a factor. Raises: argparse.ArgumentTypeError if it is below 1.

    A faster GPU would shorten a run, but not what HTTP takes and how far apart requests arrive. So
    it would change which requests meet in a batch.
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
    model = model_of(engine, arguments.device_model)
    return environment_of(
        arguments.device,
        model,
        arguments.device_tp,
        arguments.device_slowdown,
        arguments.device_weights,
    )


def model_of(engine: str, names: Sequence[str]) -> str:
    """Return the model whose times an engine takes, by ``--device-model``.

    ``stock_NAME`` has that of ``NAME``, as has ``NAME_2``, a second engine for data parallelism.

    Raises: EngineError if there is none.
    """
    engine = engine.removeprefix("stock_").removesuffix("_2")
    for_all = [name for name in names if "=" not in name]
    own = [name.partition("=")[2] for name in names if name.startswith(f"{engine}=")]
    if chosen := own or for_all:
        return chosen[-1]
    raise EngineError(
        f"--device-model {' '.join(names)} names no model for the engine {engine}: add "
        f"{engine}=NAME, or a NAME for all others"
    )


def served_model(arguments: argparse.Namespace, model: Path) -> str:
    """Return what an engine serves in place of a tiny model."""
    return f"hash:{model}" if computes_hashes(arguments) else str(model)


def computes_hashes(arguments: argparse.Namespace) -> bool:
    """Return whether engines that are started here answer by hashes of their context.

    Such engines have no log-probabilities.
    """
    return bool(getattr(arguments, "device", None)) and arguments.device_computes == "hash"


def common_slowdown(devices: Mapping[str, Mapping[str, Any]]) -> float:
    """Return by which factor all of these GPUs are slowed down; 1 without any.

    Raises: EngineError if they are not slowed down by the same factor.
    """
    factors = {name: float(device["slowdown"]) for name, device in devices.items()}
    if len(set(factors.values())) > 1:
        raise EngineError(
            f"the engines' modelled GPUs are slowed down by different factors, {factors}: start "
            "all of them with the same --flashmoa-device-slowdown"
        )
    return next(iter(factors.values()), 1.0)
