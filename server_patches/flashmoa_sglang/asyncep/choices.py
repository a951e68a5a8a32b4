"""What ``--flashmoa-asyncep`` chooses before SGLang reads its arguments: ``add_choices``.

SGLang decides about graphs and memory while it reads them, and starts its schedulers with that.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from flashmoa_sglang import options
from flashmoa_sglang.asyncep import host_memory
from flashmoa_sglang.asyncep.memory_plan import COMMUNICATION, ModelSizes, Plan, make_plan
from flashmoa_sglang.cpu import lacks_accelerator
from flashmoa_sglang.releases import RELEASE

_MEMORY_ARGUMENTS = "--chunked-prefill-size, --max-prefill-tokens and --mem-fraction-static"
# SGLang's arguments with which the model is divided in other ways than reckoned here, and their
# defaults.
_NOT_RECKONED: dict[str, Any] = {
    "pp": 1,
    "ep": 1,
    "nnodes": 1,
    "attn_dp_size": 1,
    "attn_cp_size": 1,
    "moe_dp_size": 1,
    "dcp_size": 1,
    "enable_dp_attention": False,
    "moe_a2a_backend": "none",
}
# Seconds. The driver takes some to start where no process uses the GPU.
_SMI_TIMEOUT = 60


def add_choices(
    argv: Sequence[str],
    free_memory: Callable[[argparse.Namespace], int] | None = None,
    read_config: Callable[[argparse.Namespace], dict[str, Any]] | None = None,
    host_bytes: int | None = None,
) -> list[str]:
    """Return the arguments with those that copied experts need and the user has not given.

    What is chosen, what is not, and why, is written to stderr. The choices come before the user's
    arguments, which therefore prevail.

    Args:
        free_memory: returns how many bytes each GPU has free; raises ValueError with the reason if
            that is not known. By default, nvidia-smi is asked.
        read_config: returns the model's ``config.json``; raises ValueError with the reason if it
            cannot. By default, it comes from the model's folder, or from where SGLang gets it.
        host_bytes: what the host can give; by default, that is looked up.

    Raises: SystemExit if the host has no memory for the experts.
    """
    given = read_config_file(argv)
    command = _parse(given)
    if options.Options.from_environment().asyncep == "off":
        return list(argv)
    try:
        free = (free_memory or _ask_nvidia_smi)(command)
    except ValueError as error:
        _say(
            f"nothing is chosen, because {error}; on a GPU, give {RELEASE.NO_GRAPHS} and "
            f"{_MEMORY_ARGUMENTS} yourself"
        )
        return list(argv)
    chosen = _no_graphs(given)
    try:
        config = (read_config or _read_config)(command)
        # SGLang quantises weights after it has loaded them.
        _check_host_memory(command, ModelSizes.read(config), host_bytes)
        sizes = ModelSizes.read(config, command.quantization)
        chosen += _divide_memory(command, free, sizes)
    except ValueError as error:
        if not _is_divided(command):
            _say(
                f"the device's memory is not divided, because {error}; give {_MEMORY_ARGUMENTS} "
                "yourself"
            )
    return [*chosen, *argv]


def _is_divided(command: argparse.Namespace) -> bool:
    """Return whether the user has given all that would be chosen."""
    lengths = command.chunked_prefill_size, command.max_prefill_tokens
    return None not in (*lengths, command.mem_fraction_static)


def _say(text: str) -> None:
    mode = options.Options.from_environment().asyncep
    print(f"flashmoa serve: --flashmoa-asyncep {mode}: {text}", file=sys.stderr, flush=True)


def read_config_file(argv: Sequence[str]) -> list[str]:
    """Return the arguments with those of ``--config``'s file before them, as SGLang reads them."""
    if "--config" not in argv:
        return list(argv)
    try:
        file = argv[argv.index("--config") + 1]
        values: dict[str, Any] = yaml.safe_load(Path(file).read_text()) or {}
        # None of the plugin's arguments is a flag.
        in_file = [
            f"--{name}" if value is True and not options.is_own(name) else f"--{name}={value}"
            for name, value in values.items()
            if value is not False or options.is_own(name)
        ]
    except (AttributeError, IndexError, OSError, ValueError, yaml.YAMLError):
        # SGLang will end for the same reason, and say it.
        return list(argv)
    return [*in_file, *argv]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments that decide; ``None`` stands for those that are not given."""
    parser = argparse.ArgumentParser(prog="flashmoa serve", add_help=False, allow_abbrev=False)
    options.add_arguments(None, parser)
    parser.add_argument("--model-path", "--model")
    for name in ("device", "dtype", "revision", "quantization"):
        parser.add_argument(f"--{name}")
    for name in ("chunked-prefill-size", "max-prefill-tokens"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--base-gpu-id", type=int, default=0)
    parser.add_argument("--gpu-id-step", type=int, default=1)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--moe-a2a-backend", default="none")
    parser.add_argument("--enable-dp-attention", action="store_true")
    for name, short in (("tensor", "tp"), ("pipeline", "pp"), ("data", "dp"), ("expert", "ep")):
        flags = f"--{name}-parallel-size", f"--{short}-size", f"--{short}"
        parser.add_argument(*flags, dest=short, type=int, default=1)
    for name, short in (
        ("attention-data", "attn-dp"),
        ("attention-context", "attn-cp"),
        ("moe-data", "moe-dp"),
        ("decode-context", "dcp"),
    ):
        parser.add_argument(f"--{short}-size", f"--{name}-parallel-size", type=int, default=1)
    return parser.parse_known_args(argv)[0]


def _ask_nvidia_smi(command: argparse.Namespace) -> int:
    """Return how many bytes are free on each of the GPUs that SGLang will use.

    Raises: ValueError with the reason if that is not known.
    """
    if command.device == "cpu" or lacks_accelerator():
        raise ValueError("no GPU is used")
    servers = 1 if command.enable_dp_attention else command.dp
    count = command.tp * command.pp * servers // command.nnodes
    if count < 1:
        raise ValueError(f"--nnodes {command.nnodes} machines are more than the GPUs (--tp-size)")
    first, step = command.base_gpu_id, command.gpu_id_step
    numbers = range(first, first + count * step, step)
    visible = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    if visible and numbers[-1] >= len(visible):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES has no GPU number {numbers[-1]} (--base-gpu-id, --tp-size)"
        )
    devices = ",".join(visible[number].strip() if visible else str(number) for number in numbers)
    query = ["nvidia-smi", "-i", devices, "--query-gpu=memory.free"]
    query += ["--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=_SMI_TIMEOUT
        )
        return min(map(int, answer.stdout.split())) << 20
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ValueError(
            f"nvidia-smi does not tell the memory of GPU {devices} ({error})"
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
    """Return the arguments that turn CUDA graphs off and that the user has not given."""
    named = {argument.partition("=")[0] for argument in argv}
    wanted = [f"--{flag.strip()}" for flag in RELEASE.NO_GRAPHS.split("--")[1:]]
    chosen = " ".join(flag for flag in wanted if flag.partition(" ")[0] not in named)
    if chosen:
        _say(f"chose {chosen}: a graph would look for experts where they were when it was made")
    return chosen.split()


def _check_host_memory(
    command: argparse.Namespace, sizes: ModelSizes, available: int | None
) -> None:
    """End the start with SystemExit if the host has no memory for the experts that are copied.

    They are there while the model is loaded, and those of one layer twice while they are packed.
    """
    servers = 1 if command.enable_dp_attention else command.dp
    size = servers * (sizes.copied_bytes + sizes.expert_bytes) // command.nnodes
    stays = options.Options.from_environment().on_device() == 0
    when = "" if stays else "while they are loaded, "
    purpose = f"{when}the experts of {sizes.layers - 1} layers need"
    if servers > 1:
        purpose += f", in {servers} servers (--dp-size),"
    host_memory.require(size, purpose, available)


def _divide_memory(command: argparse.Namespace, free: int, sizes: ModelSizes) -> list[str]:
    """Return the arguments that divide the device's memory and that the user has not given.

    Raises: ValueError with the reason if none can be chosen.
    """
    if _is_divided(command):
        return []
    if command.dtype in ("float", "float32"):
        raise ValueError(f"that is not reckoned for --dtype {command.dtype}")
    for name, default in _NOT_RECKONED.items():
        if getattr(command, name) != default:
            flag = f"{name}-size" if len(name) == 2 else name.replace("_", "-")
            raise ValueError(f"that is not reckoned for --{flag}")
    of_plugin = options.Options.from_environment()
    if of_plugin.kv_cache == "off" or command.chunked_prefill_size in ("-1", "0"):
        raise ValueError("without chunks, a forward may be as long as the longest prompt")
    # A chunk may be longer than --max-prefill-tokens, which bounds only what may join it.
    length = command.chunked_prefill_size or command.max_prefill_tokens
    plan = make_plan(
        sizes.of_rank(command.tp),
        free - (COMMUNICATION if command.tp > 1 else 0),
        forward=None if length is None else _tokens(length),
        fraction=command.mem_fraction_static,
        slots=of_plugin.asyncep_slots if options.is_given("asyncep_slots") else None,
        share=of_plugin.on_device() / of_plugin.replica()[1] if of_plugin.on_device() else 0.0,
    )
    on_host = round(sizes.copied_bytes * (1 - of_plugin.on_device()))
    return list(_arguments(command, plan, free, on_host))


def _tokens(length: str) -> int:
    """Return the tokens of a forward that the user has given; ValueError if it is no number."""
    if not length.isdecimal() or not int(length):
        raise ValueError(f"{length} tokens is not a plain number above 0")
    return int(length)


def _arguments(command: argparse.Namespace, plan: Plan, free: int, on_host: int) -> Iterator[str]:
    """Yield the plan's arguments that the user has not given, and say why they were chosen."""
    forward = {
        "--chunked-prefill-size": command.chunked_prefill_size,
        "--max-prefill-tokens": command.max_prefill_tokens,
    }
    lengths = [f"{flag} {plan.forward}" for flag, value in forward.items() if value is None]
    pinned = f", and {_gib(on_host)} of host memory are pinned" if on_host else ""
    chosen = [
        (
            [] if options.is_given("asyncep_slots") else [f"--flashmoa-asyncep-slots {plan.slots}"],
            f"with the first layer and all that is no expert, {_gib(plan.weights)} of weights stay "
            f"on the device{pinned}",
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
