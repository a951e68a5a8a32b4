"""What ``--flashmoa-asyncep`` chooses on a GPU where the user does not: ``choose_arguments``."""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from flashmoa_sglang.asyncep import is_given
from flashmoa_sglang.cpu import lacks_accelerator
from flashmoa_sglang.options import Options
from flashmoa_sglang.releases import RELEASE

logger = logging.getLogger(__name__)
_GIB = 1 << 30
# Bytes that CUDA's context and libraries take before the weights are loaded: twice the usual.
_CONTEXT = 2 * _GIB
# Factor for the allocator's fragments and the kernels' workspaces.
_MARGIN = 1.5
# Bytes for the logits of a forward of many short prompts, whatever the forward's length.
_LOGITS = 2 * _GIB
# Tokens of the forwards to choose from, the best one first. A longer one than the first would hide
# no more: a layer's computation takes longer than its copy from some 80,000 tokens on, on an H200.
# The last one is SGLang's own choice on these GPUs.
_FORWARDS = (131_072, 65_536, 32_768, 16_384, 8_192)
# The least part of the memory that weights and KV get, but for forwards of the least length.
_LEAST_FRACTION = 0.7
# SGLang's default for --max-prefill-tokens.
_MAX_PREFILL_TOKENS = 16_384
# The key of an expert's width, for the models whose tensors are all in the sum below.
_WIDTHS = {
    "mixtral": "intermediate_size",
    "olmoe": "intermediate_size",
    "qwen3_moe": "moe_intermediate_size",
}
# Arguments with which tensors have other sizes, as where experts compute with other GPUs' tokens,
# too, and the values with which they have not. Releases differ in which of them they have.
_NOT_RECKONED = (
    "dtype",
    "moe_a2a_backend",
    "enable_dp_attention",
    "attn_dp_size",
    "attn_cp_size",
    "moe_dp_size",
    "dcp_size",
)
_RECKONED = ("auto", "half", "float16", "bfloat16", "none")
# What SGLang 0.5.12 calls some of its arguments until it has made its dataclass of them.
_LONG_NAMES = {
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
    "attn_cp_size": "attention_context_parallel_size",
    "moe_dp_size": "moe_data_parallel_size",
}


def choose_arguments(original: Callable[..., Any], cls: type, args: Namespace) -> Any:
    """Choose what copied experts need and the user has not given; wraps ``from_cli_args``.

    CUDA graphs are turned off. Forwards become as long as the memory allows, unless the user gives
    ``--chunked-prefill-size`` or ``--mem-fraction-static``. The log says what is chosen, or why
    nothing is and what to give.
    """
    mode = Options.from_environment().asyncep
    if mode == "off" or args.device == "cpu" or lacks_accelerator():
        return original(cls, args)
    for argument in RELEASE.NO_GRAPHS.split("--")[1:]:
        name, _, value = argument.strip().replace("-", "_").partition(" ")
        if not getattr(args, name):
            setattr(args, name, value or True)
    if args.chunked_prefill_size is None and args.mem_fraction_static is None:
        try:
            _lengthen_forwards(args, mode)
        except ValueError as error:
            logger.warning(
                "--flashmoa-asyncep %s: forwards are as long as SGLang chooses, perhaps too short "
                "to hide copies of experts, because %s. Give --chunked-prefill-size, "
                "--max-prefill-tokens and --mem-fraction-static yourself.",
                mode,
                error,
            )
    return original(cls, args)


def _lengthen_forwards(given: Namespace, mode: str) -> None:
    """Choose the length of forwards, and how much memory they leave to weights and KV.

    Raises: ValueError with the reason if that cannot be chosen.
    """
    for name in _NOT_RECKONED:
        value = _argument(given, name)
        if is_given(value) and value not in _RECKONED:
            raise ValueError(f"memory is not reckoned for --{name.replace('_', '-')} {value}")
    peak = peak_bytes(_read_config(given))
    free = _free_memory(given)
    forward, fraction = divide_memory(peak, free)
    given.chunked_prefill_size, given.mem_fraction_static = forward, fraction
    if given.max_prefill_tokens in (None, _MAX_PREFILL_TOKENS):
        given.max_prefill_tokens = forward
    logger.info(
        "--flashmoa-asyncep %s: chose --chunked-prefill-size %d --max-prefill-tokens %d "
        "--mem-fraction-static %s. Long forwards hide the copies; of %s that are free, the tensors "
        "of this one take %s.",
        mode,
        forward,
        given.max_prefill_tokens,
        fraction,
        gib(free),
        gib(forward * peak),
    )


def divide_memory(peak: int, free: int) -> tuple[int, float]:
    """Return the tokens of the longest forward that fits, and the fraction for weights and KV.

    Args:
        peak: bytes of a forward's tensors for each token.
        free: bytes of the device's memory that are free before the server starts.

    Raises: ValueError if no forward fits.
    """
    usable = free - _CONTEXT
    for forward in _FORWARDS:
        room = _MARGIN * forward * peak + _LOGITS
        fraction = math.floor(100 * (1 - room / usable)) / 100 if usable > room else 0.0
        if fraction >= _LEAST_FRACTION or (forward == _FORWARDS[-1] and fraction > 0):
            return forward, fraction
    raise ValueError(f"forwards do not fit into the {gib(free)} that are free")


def peak_bytes(config: Mapping[str, Any]) -> int:
    """Return how many bytes the tensors of a forward take at their peak, for each of its tokens.

    This is by the tensors that SGLang makes with Triton's kernels for experts, which have a row for
    each token and expert, in bfloat16; with those that FP8 adds. Tensor parallelism needs less.

    Args: config: a model's ``config.json``.
    Raises: ValueError if the model is none whose tensors are known.
    """
    kind = config.get("model_type", "")
    if kind not in _WIDTHS:
        known = ", ".join(sorted(_WIDTHS))
        raise ValueError(f"the memory of model_type {kind!r} is not known (known: {known})")
    try:
        hidden, rows = config["hidden_size"], config["num_experts_per_tok"]
        width = config[_WIDTHS[kind]]
    except KeyError as error:
        raise ValueError(f"config.json has no {error}") from error
    # Gate and up projections, their product, and the down projection.
    experts = 2 * rows * (2 * width + width + hidden)
    # In FP8, the inputs of both projections again in one byte each.
    quantised = hidden + rows * width
    # The input, the output, the residual and its sum.
    return experts + quantised + 2 * 4 * hidden


def _argument(given: Namespace, name: str) -> Any:
    """Return an argument of SGLang in any release; ``None`` if this one has none of that name."""
    return getattr(given, name, getattr(given, _LONG_NAMES.get(name, name), None))


def gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB"


def _free_memory(given: Namespace) -> int:
    """Return how many bytes are free on each of the GPUs that SGLang will use here.

    Raises: ValueError with the reason if that is not known.
    """
    import torch

    first, step = given.base_gpu_id, given.gpu_id_step
    sizes = (_argument(given, name) for name in ("tp_size", "pp_size", "dp_size"))
    count = math.prod(sizes) // given.nnodes
    try:
        return min(
            torch.cuda.get_device_properties(gpu).total_memory - torch.cuda.device_memory_used(gpu)
            for gpu in range(first, first + count * step, step)
        )
    except Exception as error:  # Torch and NVML have many.
        raise ValueError(f"the free memory of the GPUs is not known ({error})") from error


def _read_config(given: Namespace) -> dict[str, Any]:
    """Read the model's ``config.json`` from its folder, or get it as SGLang will.

    Raises: ValueError with the reason if there is none.
    """
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(given.model_path, revision=given.revision)[0]
    except OSError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(f"{given.model_path} has no config.json to read ({reason})") from error
