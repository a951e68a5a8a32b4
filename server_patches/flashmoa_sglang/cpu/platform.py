"""A platform that runs stock SGLang on any CPU, without ``sgl_kernel`` and without AMX.

SGLang asks every ``sglang.srt.platforms`` entry point for a platform class. An
out-of-tree platform whose dispatch key is ``native`` makes each fused op take its
pure-torch path. What is left is the attention backend: the stock ``torch_native`` one
recomputes the whole cached prefix as if it were queries on every extend, which makes a
cached prefix, and so incremental prefill, worthless. Ours computes the new rows only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.platforms.interface import PlatformEnum

from flashmoa_sglang import cpu
from flashmoa_sglang.cpu.host_memory import Unpinned, as_it_is
from flashmoa_sglang.releases import RELEASE

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

# SGLang keeps a list of backends that can do without Triton, by name, and this is the one a
# CPU can use; so the platform brings its own backend under the stock one's name.
ATTENTION_BACKEND = "torch_native"
DEFAULT_KV_TOKENS = 65536


def activate() -> str | None:
    """Return the platform's path where no accelerator is usable, else ``None``."""
    return f"{__name__}:TorchCpuPlatform" if cpu.is_all_there_is() else None


class TorchCpuPlatform(RELEASE.cpu_platform()):
    """SGLang on plain torch CPU ops, in float32 or bfloat16."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        """Fill in what a CPU needs wherever the user did not say otherwise."""
        # SGLang has already put its AMX backend in; that one needs a kernel build no
        # registry carries, so it can only be the default and not a choice.
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = ATTENTION_BACKEND
        if server_args.dtype == "auto":
            server_args.dtype = "float32"
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = DEFAULT_KV_TOKENS
        server_args.sampling_backend = "pytorch"
        if server_args.disaggregation_mode == "prefill":
            # There the overlap schedule records CUDA events.
            server_args.disable_overlap_schedule = True
        # An idle scheduler otherwise spins a whole core.
        server_args.sleep_on_idle = True

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_device(self, device_id: int | None = None) -> str:
        """Return a string, as SGLang's argument handling expects (its own mixin gives a device)."""
        return self.device_type

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_dispatch_key_name(self) -> str:
        return "native"

    def init_backend(self) -> None:
        """Register our attention in each worker, before SGLang looks its backend up."""
        super().init_backend()
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.lora import layers
        from sglang.srt.lora.backend import torch_backend

        # SGLang's LoRA asks for pinned memory on any device, which torch refuses on a CPU.
        layers.torch = torch_backend.torch = Unpinned("torch")
        torch.Tensor.pin_memory = as_it_is  # pyright: ignore[reportAttributeAccessIssue]

        @register_attention_backend(ATTENTION_BACKEND)
        def create(runner: Any) -> Any:
            from flashmoa_sglang.cpu.attention import CpuAttentionBackend

            return CpuAttentionBackend(runner)
