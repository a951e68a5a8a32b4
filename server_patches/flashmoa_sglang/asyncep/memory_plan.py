"""What ``--flashmoa-asyncep`` chooses on a GPU where the user does not: ``choose_arguments``."""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
# SGLang admits the next forward while the KV of the last one is still held.
_FORWARDS_IN_POOL = 2
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
    needs = Needs.of(
        _read_config(given),
        given.quantization,
        _argument(given, "tp_size"),
        _argument(given, "pp_size"),
    )
    free = _free_memory(given)
    is_default = given.max_prefill_tokens in (None, _MAX_PREFILL_TOKENS)
    forward, fraction = divide_memory(needs, free, None if is_default else given.max_prefill_tokens)
    given.chunked_prefill_size, given.mem_fraction_static = forward, fraction
    if is_default:
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
        gib(forward * needs.peak),
    )


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a model needs on each GPU.

    Attributes:
        weights: with the first layer's experts, the slots' and the replica's share.
        kv: of a token, in bfloat16.
        peak: what the tensors of a forward take at their peak, for each of its tokens. This is by
            the tensors that SGLang makes with Triton's kernels for experts, which have a row for
            each token and expert, in bfloat16. Tensor parallelism needs less.
    """

    weights: int
    kv: int
    peak: int

    @classmethod
    def of(
        cls, config: Mapping[str, Any], quantization: str | None = None, tp: int = 1, pp: int = 1
    ) -> Needs:
        """Reckon with the plugin's options.

        Args:
            config: a model's ``config.json``.
            quantization: what ``--quantization`` says, ``None`` if it is not given.

        Raises: ValueError if the model is none whose memory is known.
        """
        kind = config.get("model_type", "")
        if kind not in _WIDTHS:
            known = ", ".join(sorted(_WIDTHS))
            raise ValueError(f"the memory of model_type {kind!r} is not known (known: {known})")
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise ValueError("some layers have no experts, and their memory is not known")
        quantization = quantization or (config.get("quantization_config") or {}).get("quant_method")
        if quantization not in (None, "fp8"):
            raise ValueError(f"the memory of quantization {quantization!r} is not known")
        try:
            hidden, rows = config["hidden_size"], config["num_experts_per_tok"]
            width, heads = config[_WIDTHS[kind]], config["num_attention_heads"]
            layers = -(-config["num_hidden_layers"] // pp)
            embeddings = (1 if config.get("tie_word_embeddings") else 2) * config["vocab_size"]
            experts = config.get("num_experts") or config["num_local_experts"]
        except KeyError as error:
            raise ValueError(f"config.json has no {error}") from error
        kv_heads = config.get("num_key_value_heads") or heads
        head = config.get("head_dim") or hidden // heads
        # In FP8, each block of 128 x 128 weights has a scale of 4 bytes.
        size = 1 + 4 / 128**2 if quantization else 2
        of_experts = size * experts * 3 * hidden * width
        others = layers * hidden * (size * 2 * (heads + kv_heads) * head + 2 * (experts + 2))
        options = Options.from_environment()
        share = options.on_device() / options.replica()[1] if options.on_device() else 0.0
        held = min(layers, 1 + options.asyncep_slots) + share * (layers - 1)
        # Gate and up projections, their product, and the down projection; in FP8, the inputs of
        # both projections again in one byte each.
        in_layer = 2 * rows * (3 * width + hidden) + (hidden + rows * width if quantization else 0)
        return cls(
            weights=round(others + 2 * embeddings * hidden + held * of_experts) // tp,
            kv=layers * 2 * max(1, kv_heads // tp) * head * 2,
            # With the input, the output, the residual and its sum.
            peak=in_layer + 2 * 4 * hidden,
        )


def divide_memory(needs: Needs, free: int, most: int | None = None) -> tuple[int, float]:
    """Return the tokens of the longest forward that fits, and the fraction for weights and KV.

    Args:
        free: bytes of the device's memory that are free before the server starts.
        most: tokens of a forward at most.

    Raises: ValueError if no forward fits.
    """
    usable = free - _CONTEXT
    most = most or _FORWARDS[0]
    for forward in [tokens for tokens in _FORWARDS if tokens <= most] or [most]:
        room = _MARGIN * forward * needs.peak + _LOGITS
        fraction = math.floor(100 * (1 - room / usable)) / 100 if usable > room else 0.0
        kv = _FORWARDS_IN_POOL * forward * needs.kv
        if fraction > 0 and usable * fraction >= needs.weights + kv:
            return forward, fraction
    raise ValueError(
        f"forwards do not fit into the {gib(free)} that are free, beside weights of "
        f"{gib(needs.weights)}"
    )


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
