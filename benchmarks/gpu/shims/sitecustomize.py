"""Lets SGLang 0.5.12 run on CUDA without IPython, flashinfer and runtime compilation.

Python imports this module at the start of every process with this folder in PYTHONPATH, so in all
processes of an engine. It patches a module of SGLang right after its import. sgl_kernel and torch
replace the kernels that SGLang compiles at first use, which takes minutes. With
FLASHMOA_GPU_KERNELS=compiled, SGLang compiles them.
"""

# Type checkers do not find SGLang and its kernels.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownLambdaType=false

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

# Dummy weights are uniform within this distance from 0. SGLang's own are so small that all answers
# would be equal.
WEIGHTS = 0.03


def replace_activation(module: Any) -> None:
    """Take the activations of feed-forward layers from sgl_kernel."""

    def make(kernel: str) -> Callable[..., Any]:
        def activate(
            hidden: Any, out: Any = None, expert_ids: Any = None, expert_step: int = 1
        ) -> Any:
            import sgl_kernel

            if out is None:
                out = hidden.new_empty(*hidden.shape[:-1], hidden.shape[-1] // 2)
            # This also computes rows of experts elsewhere, which nobody reads.
            getattr(sgl_kernel, kernel)(hidden, out)
            return out

        return activate

    kernels = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}
    made = {name: make(kernel) for name, kernel in kernels.items()}
    for name, kernel in kernels.items():
        setattr(module, kernel, made[name])
    module.run_activation = lambda op_name, *args, **options: made[op_name](*args, **options)


def replace_rope(module: Any) -> None:
    """Take rotary embeddings from sgl_kernel, which needs their table in the queries' type."""
    tables: dict[tuple[int, Any], Any] = {}

    def rotate(
        positions: Any, query: Any, key: Any, head_size: int, table: Any, is_neox: bool = True
    ) -> tuple[Any, Any]:
        import sgl_kernel

        name = table.data_ptr(), query.dtype
        if name not in tables:
            tables[name] = table.to(query.dtype)
        sgl_kernel.rotary_embedding(positions.long(), query, key, head_size, tables[name], is_neox)
        return query, key

    def rotate_and_store(  # noqa: PLR0913 - SGLang's own
        q: Any,
        k: Any,
        cos_sin_cache: Any,
        positions: Any,
        *,
        is_neox: bool,
        rope_dim: int = 0,
        fused_args: Any = None,
    ) -> None:
        rotate(positions, q, k, q.shape[-1], cos_sin_cache, is_neox)
        if fused_args is not None:
            store_rows(fused_args.k_buffer, fused_args.cache_loc, k)
            store_rows(fused_args.v_buffer, fused_args.cache_loc, fused_args.value)

    module.rotary_embedding = rotate
    module.apply_rope_with_cos_sin_cache_inplace = rotate_and_store


def store_rows(cache: Any, places: Any, values: Any) -> None:
    """Write the KV of tokens, a row each, to their places in a cache."""
    rows = values.reshape(values.shape[0], -1)
    cache.view(-1, rows.shape[1])[places] = rows


def replace_clamp(module: Any) -> None:
    """Compute the positions of decoded tokens by torch."""
    module.clamp_position_cuda = lambda seq_lens: (seq_lens - 1).clamp(min=0)


def replace_resolve(module: Any) -> None:
    """Replace negative numbers by the previous step's tokens, by torch."""

    def resolve(input_ids: Any, future_token_ids_map: Any) -> None:
        import torch

        known = future_token_ids_map[(-input_ids).clamp(min=0)]
        input_ids.copy_(torch.where(input_ids < 0, known, input_ids))

    module.resolve_future_token_ids_cuda = resolve


def switch_off(module: Any) -> None:
    """Report that a fused kernel cannot be used, so that SGLang computes otherwise."""
    for name in dir(module):
        if name.startswith("can_use_"):
            setattr(module, name, lambda *_args, **_options: False)


def replace_weights(module: Any) -> None:
    """Make dummy weights that are large enough for answers to depend on the whole prompt.

    The GPU makes all weights, even of experts in host memory. So every engine of a model has the
    same weights, and a CPU core would take minutes instead of seconds. Norms are 1.
    """

    def initialize(model: Any, low: float = 0, high: float = 0, seed: int = 1234) -> None:
        import torch

        gpu = torch.device("cuda") if torch.cuda.is_available() else None
        for number, (name, weight) in enumerate(model.state_dict().items()):
            if not weight.is_floating_point():
                continue
            if "norm" in name:
                weight.data.fill_(1)
                continue
            place = gpu or weight.device
            generator = torch.Generator(device=place).manual_seed(seed + number)
            made = torch.empty_like(weight.data, device=place)
            weight.data.copy_(made.uniform_(-WEIGHTS, WEIGHTS, generator=generator))

    module.initialize_dummy_weights = initialize


_KERNELS: dict[str, Callable[[Any], None]] = {
    "sglang.jit_kernel.activation": replace_activation,
    "sglang.jit_kernel.rope": replace_rope,
    "sglang.jit_kernel.clamp_position": replace_clamp,
    "sglang.jit_kernel.resolve_future_token_ids": replace_resolve,
    "sglang.jit_kernel.kvcache": switch_off,
    "sglang.jit_kernel.norm": switch_off,
    "sglang.jit_kernel.fused_qknorm_rope": switch_off,
}
# Functions that patch a module of SGLang, by the module's name.
PATCHES = {
    "sglang.srt.model_loader.weight_utils": replace_weights,
    **(_KERNELS if os.environ.get("FLASHMOA_GPU_KERNELS") != "compiled" else {}),
}
# Names that SGLang imports at start and these checks do not need, by module.
STUBS = {
    "IPython": (),
    "IPython.display": ("HTML", "display"),
    "flashinfer": (),
    "flashinfer.prefill": ("cudnn_batch_prefill_with_kv_cache",),
    "flashinfer.sampling": ("min_p_sampling_from_probs", "top_k_top_p_sampling_from_probs"),
}


class _Stub:
    """Loads a module of ``STUBS``."""

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Leave it to Python."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        vars(module).update(dict.fromkeys(STUBS[module.__name__]))


class _Patcher:
    """Finds modules as Python does, and patches the modules in ``PATCHES`` after their import."""

    @staticmethod
    def find_spec(name: str, _path: Any = None, _target: Any = None) -> Any:
        if name in STUBS:
            return ModuleSpec(name, cast("Any", _Stub), is_package=True)
        # Without this name in PATCHES, the search below does not come here again.
        patch = PATCHES.pop(name, None)
        spec = importlib.util.find_spec(name) if patch is not None else None
        if patch is None or spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_patch(module: ModuleType) -> None:
            run(module)
            patch(module)

        spec.loader.exec_module = run_and_patch
        return spec


sys.meta_path.insert(0, _Patcher)  # pyright: ignore[reportArgumentType]
