"""What ``--flashmoa-asyncep h2d`` chooses before SGLang reads its arguments: ``add_choices``.

SGLang decides about graphs and memory while it reads them, and starts its schedulers with that.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flashmoa_sglang import options
from flashmoa_sglang.asyncep.memory_plan import ModelSizes, Plan, make_plan
from flashmoa_sglang.cpu import lacks_accelerator
from flashmoa_sglang.releases import RELEASE

_MODE = "--flashmoa-asyncep h2d"
_MEMORY_ARGUMENTS = "--chunked-prefill-size, --max-prefill-tokens and --mem-fraction-static"
# Seconds. The driver takes some to start where no process uses the GPU.
_SMI_TIMEOUT = 60


def add_choices(
    argv: Sequence[str],
    free_memory: Callable[[argparse.Namespace], int] | None = None,
    read_config: Callable[[argparse.Namespace], dict[str, Any]] | None = None,
) -> list[str]:
    """Return the arguments with those that ``h2d`` needs and the user has not command.

    What is chosen, what is not, and why, is written to stderr. The choices come before the user's
    arguments, which therefore prevail.

    Args:
        free_memory: returns how many bytes the GPU has free; raises ValueError with the reason if
            that is not known. By default, nvidia-smi is asked.
        read_config: returns the model's ``config.json``; raises ValueError with the reason if it
            cannot. By default, it comes from the model's folder, or from where SGLang gets it.
    """
    command = _parse(argv)
    if options.Options.from_environment().asyncep != "h2d":
        return list(argv)
    try:
        if command.config is not None:
            raise ValueError(f"what {command.config} (--config) says is read only later")
        free = (free_memory or _ask_nvidia_smi)(command)
    except ValueError as error:
        _say(
            f"nothing is chosen, because {error}; on a GPU, give {RELEASE.NO_GRAPHS} and "
            f"{_MEMORY_ARGUMENTS} yourself"
        )
        return list(argv)
    chosen = _no_graphs(argv)
    try:
        chosen += _divide_memory(command, free, read_config or _read_config)
    except ValueError as error:
        _say(
            f"the device's memory is not divided, because {error}; give {_MEMORY_ARGUMENTS} "
            "yourself"
        )
    return [*chosen, *argv]


def _say(text: str) -> None:
    print(f"flashmoa serve: {_MODE}: {text}", file=sys.stderr, flush=True)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments that decide; ``None`` stands for those that are not command."""
    parser = argparse.ArgumentParser(prog="flashmoa serve", add_help=False, allow_abbrev=False)
    options.add_arguments(None, parser)
    for flags in (
        ("--config",),
        ("--device",),
        ("--dtype",),
        ("--model-path", "--model"),
        ("--revision",),
        ("--quantization",),
        ("--chunked-prefill-size",),
        ("--max-prefill-tokens",),
    ):
        parser.add_argument(*flags)
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--base-gpu-id", type=int, default=0)
    for name, short in (("tensor", "tp"), ("pipeline", "pp"), ("data", "dp")):
        flags = f"--{name}-parallel-size", f"--{short}-size", f"--{short}"
        parser.add_argument(*flags, dest=short, type=int, default=1)
    return parser.parse_known_args(argv)[0]


def _ask_nvidia_smi(command: argparse.Namespace) -> int:
    """Return how many bytes of the GPU that SGLang will use are free.

    Raises: ValueError with the reason if that is not known.
    """
    if command.device == "cpu" or lacks_accelerator():
        raise ValueError("no GPU is used")
    devices = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    number: int = command.base_gpu_id
    if devices and number >= len(devices):
        raise ValueError(f"CUDA_VISIBLE_DEVICES has no GPU number {number} (--base-gpu-id)")
    device = devices[number].strip() if devices else str(number)
    query = ["nvidia-smi", "-i", device, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=_SMI_TIMEOUT
        )
        return int(answer.stdout) << 20
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ValueError(
            f"nvidia-smi does not tell the memory of GPU {device} ({error})"
        ) from error


def _read_config(command: argparse.Namespace) -> dict[str, Any]:
    """Read the model's ``config.json`` from its folder, or get it as SGLang will.

    Raises: ValueError with the reason if there is none.
    """
    from transformers import PretrainedConfig

    if command.model_path is None:
        raise ValueError("no model is given (--model-path)")
    try:
        config = PretrainedConfig.get_config_dict(command.model_path, revision=command.revision)[0]
    except OSError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(f"{command.model_path} has no config.json to read ({reason})") from error
    if not config:
        raise ValueError(f"{command.model_path} has no config.json")
    return config


def _no_graphs(argv: Sequence[str]) -> list[str]:
    """Return the arguments that turn CUDA graphs off and that the user has not command."""
    named = {argument.partition("=")[0] for argument in argv}
    wanted = [f"--{flag.strip()}" for flag in RELEASE.NO_GRAPHS.split("--")[1:]]
    chosen = " ".join(flag for flag in wanted if flag.partition(" ")[0] not in named)
    if chosen:
        _say(f"chose {chosen}: a graph would look for experts where they were when it was made")
    return chosen.split()


def _divide_memory(
    command: argparse.Namespace,
    free: int,
    read_config: Callable[[argparse.Namespace], dict[str, Any]],
) -> list[str]:
    """Return the arguments that divide the device's memory and that the user has not command.

    Raises: ValueError with the reason if none can be chosen.
    """
    lengths = command.chunked_prefill_size, command.max_prefill_tokens
    if None not in (*lengths, command.mem_fraction_static):
        return []
    if command.dtype in ("float", "float32"):
        raise ValueError(f"that is not reckoned for --dtype {command.dtype}")
    if max(command.tp, command.pp, command.dp) > 1:
        raise ValueError("that is reckoned for one GPU only")
    of_plugin = options.Options.from_environment()
    if of_plugin.kv_cache == "off" or command.chunked_prefill_size in ("-1", "0"):
        raise ValueError("without chunks, a forward may be as long as the longest prompt")
    plan = make_plan(
        ModelSizes.read(read_config(command), command.quantization),
        free,
        forward=min((_tokens(length) for length in lengths if length is not None), default=None),
        fraction=command.mem_fraction_static,
        slots=of_plugin.asyncep_slots if options.is_given("asyncep_slots") else None,
    )
    return list(_arguments(command, plan, free))


def _tokens(length: str) -> int:
    """Return the tokens of a forward that the user has given; ValueError if it is no number."""
    if not length.isdecimal() or not int(length):
        raise ValueError(f"{length} tokens is not a plain number above 0")
    return int(length)


def _arguments(command: argparse.Namespace, plan: Plan, free: int) -> Iterator[str]:
    """Yield the plan's arguments that the user has not given, and say why they were chosen."""
    forward = {
        "--chunked-prefill-size": command.chunked_prefill_size,
        "--max-prefill-tokens": command.max_prefill_tokens,
    }
    lengths = [f"{flag} {plan.forward}" for flag, value in forward.items() if value is None]
    chosen = [
        (
            [] if options.is_given("asyncep_slots") else [f"--flashmoa-asyncep-slots {plan.slots}"],
            f"with the first layer and all that is no expert, {_gib(plan.weights)} of weights stay "
            f"on the device, and {_gib(plan.on_host)} of host memory are pinned",
        ),
        (
            lengths,
            f"long forwards hide the copies; the tensors of this one take {_gib(plan.peak)}",
        ),
        (
            [f"--mem-fraction-static {plan.fraction}"]
            if command.mem_fraction_static is None
            else [],
            f"of {_gib(free)} that are free, {_gib(plan.left)} are left to forwards, and the KV "
            f"pool has room for some {plan.pool // 1000},000 tokens",
        ),
    ]
    for arguments, reason in chosen:
        if arguments:
            text = " ".join(arguments)
            _say(f"chose {text}: {reason}")
            yield from text.split()


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
