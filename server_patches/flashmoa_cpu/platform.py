"""A platform that runs stock SGLang on any CPU, without ``sgl_kernel`` and without AMX.

SGLang asks every ``sglang.srt.platforms`` entry point for a platform class. With an out-of-tree
platform whose dispatch key is ``native``, each fused op takes its pure-torch path. Only the
attention backend has to be replaced: on every extend, the stock ``torch_native`` computes queries
for the whole cached prefix again, so that a cached prefix saves nothing, nor does incremental
prefill. This platform's backend computes only the new rows.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from flashmoa_sglang.sglang.options import lacks_accelerator
from sglang.srt.platforms.interface import PlatformEnum

from flashmoa_cpu import releases
from flashmoa_cpu.pd_pairs import prepare_pd_pairs

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from torch import Tensor

# SGLang lists the names of backends that need no Triton, and on a CPU only this one works. So the
# platform registers its backend under the stock name.
ATTENTION_BACKEND = "torch_native"
# Arguments of SGLang that need a GPU, and why.
_NEEDS_GPU = {
    "--speculative-algorithm": (
        "SGLang verifies draft tokens with sgl_kernel, which has no build for this platform"
    ),
    "--enable-hierarchical-cache": "SGLang registers the host memory with CUDA",
}


def activate() -> str | None:
    """Return the path of the platform class if no accelerator can be used, else ``None``."""
    return f"{__name__}:TorchCpuPlatform" if lacks_accelerator() else None


class _Pools:
    """Names the classes that a platform may choose."""

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from flashmoa_cpu.allocator import CpuPagedAllocator

        return CpuPagedAllocator


class TorchCpuPlatform(releases.platform_base(_Pools)):
    """Runs SGLang on torch's CPU ops, in float32 or bfloat16."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Set the arguments that a CPU needs and the user has not given.

        Raises: SystemExit if the user has given one that needs a GPU.
        """
        for argument, reason in _NEEDS_GPU.items():
            if getattr(server_args, argument[2:].replace("-", "_")):
                raise SystemExit(f"flashmoa serve: {argument} needs a GPU: {reason}. Leave it out.")
        # SGLang's default is its AMX backend, which needs a build of the kernels that no registry
        # has. So it is not the user's choice.
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = ATTENTION_BACKEND
        if server_args.dtype == "auto":
            server_args.dtype = "float32"
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = 65536
        server_args.sampling_backend = "pytorch"
        # For an out-of-tree platform, SGLang makes one pool, without a separate one for windows.
        server_args.disable_hybrid_swa_memory = True
        if server_args.disaggregation_mode == "prefill":
            # A prefill engine of a PD pair records CUDA events under the overlap schedule.
            server_args.disable_overlap_schedule = True
        # Otherwise an idle scheduler keeps a core busy.
        server_args.sleep_on_idle = True

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_device(self, device_id: int | None = None) -> str:
        """Return a string, which SGLang's arguments require; its own mixin returns a device."""
        return self.device_type

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_dispatch_key_name(self) -> str:
        return "native"

    def init_backend(self) -> None:
        """Register the attention backend in each worker, before SGLang looks for one."""
        super().init_backend()
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        # Torch refuses pinned memory on a CPU.
        for module in releases.repair():
            module.torch = _UnpinnedTorch("torch")
        torch.Tensor.pin_memory = _skip_pinning  # pyright: ignore[reportAttributeAccessIssue]

        @register_attention_backend(ATTENTION_BACKEND)
        def create(runner: ModelRunner) -> Any:
            prepare_pd_pairs(runner.server_args)
            return make_attention(runner)


def make_attention(runner: ModelRunner) -> Any:
    """Make the attention backend of a worker. Modelled GPUs hook this function."""
    from flashmoa_cpu.attention import CpuAttentionBackend

    return CpuAttentionBackend(runner)


class _UnpinnedTorch(ModuleType):
    """Replaces ``torch`` in modules that ask for pinned memory on any device."""

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(torch, name)
        creates = name in ("tensor", "zeros", "empty", "arange")
        return _ignore_pinning(attribute) if creates else attribute


def _ignore_pinning(original: Any) -> Any:
    def create(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return original(*args, **options)

    return create


def _skip_pinning(tensor: Tensor, _device: object = None) -> Tensor:
    return tensor
