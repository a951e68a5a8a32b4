"""The differences between SGLang's releases on a CPU."""

# The type checker has another release, which lacks some attributes of 0.5.12.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from flashmoa_sglang.sglang.releases import RELEASE, Release0512, Release0521

_IS_0_5_12 = isinstance(RELEASE, Release0512)


def platform_base(pools: type) -> type:
    """Return the base class of the CPU platform.

    Args: pools: names a KV pool and an allocator, for releases whose own class names none.
    """
    from sglang.srt.platforms.interface import SRTPlatform

    if _IS_0_5_12:
        return type("CpuPlatform", (pools, _Memory, SRTPlatform), {})
    from sglang.srt.platforms.cpu import CpuDeviceMixin

    bases = (pools,) if isinstance(RELEASE, Release0521) else ()
    return type("CpuPlatform", (CpuDeviceMixin, *bases, SRTPlatform), {})


class _Memory:
    """The memory of the machine, which SGLang 0.5.12 reads from no mixin."""

    def get_device_total_memory(self, device_id: int = 0) -> int:
        import psutil

        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: Any = None) -> float:
        import psutil

        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)


def repair() -> list[Any]:
    """Repair SGLang in a worker; return its modules that ask for pinned memory on any device."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    if not _IS_0_5_12:
        return [layers, torch_backend]
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
    from sglang.srt.layers import logits_processor
    from sglang.srt.layers.rotary_embedding import base

    # SGLang assumes that an unknown platform has vLLM's rotary kernel.
    base._is_cpu = True
    # Without this, a request with a grammar ends the scheduler.
    XGrammarGrammar.apply_vocab_mask = staticmethod(_mask_on_cpu)
    # A request for the log-probabilities of its prompt would end the scheduler, too.
    return [layers, torch_backend, logits_processor]


def _mask_on_cpu(logits: Any, vocab_mask: Any) -> None:
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")


def write_location(attention: Any, forward_batch: Any) -> Any:
    """Return the location of a batch's new keys that ``set_kv_buffer`` of the pool takes."""
    if _IS_0_5_12:
        return forward_batch.out_cache_loc
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    return KVWriteLoc(forward_batch.out_cache_loc, attention.swa_out_cache_loc)
