"""Prefill-only work without a KV cache (MoE-Prefill §6.3), for models that generate.

Without decodes, chunked prompts and shared prefixes, only the layer itself reads its keys and
values, in the same forward. So one layer's buffers serve all layers in turn. SGLang's
``--prefill-only-disable-kv-cache`` needs no buffers, but is for embedding models.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

from flashmoa_sglang.sglang.options import Options

KEEPS_NONE = "This engine keeps no KV (--flashmoa-kv-cache off)"
_NEEDED = {
    "--disable-radix-cache": lambda given: given.disable_radix_cache,
    # By default SGLang chooses a chunk size.
    "--chunked-prefill-size -1": lambda given: (given.chunked_prefill_size or 1) < 0,
    # The warm-up decodes eight tokens.
    "--skip-server-warmup": lambda given: given.skip_server_warmup,
    # By default SGLang computes a fraction, which is negative if forwards have many tokens.
    "--mem-fraction-static 0.6 (for example)": lambda given: given.mem_fraction_static > 0,
}
_EXCLUDED = {
    "--speculative-algorithm": lambda given: given.speculative_algorithm,
    "--disaggregation-mode": lambda given: given.disaggregation_mode not in (None, "null"),
    "--enable-hierarchical-cache": lambda given: given.enable_hierarchical_cache,
    "--pp-size": lambda given: given.pp_size > 1,
}


def is_on() -> bool:
    return Options.from_environment().kv_cache == "off"


def refuse_unsupported(arguments: Any) -> None:
    """Refuse a server that would read KV of an earlier forward.

    Args: arguments: SGLang's resolved arguments.
    Raises: SystemExit if an argument is missing, or one does not go with the option.
    """
    if missing := [flag for flag, is_given in _NEEDED.items() if not is_given(arguments)]:
        raise SystemExit(f"--flashmoa-kv-cache off needs {' '.join(missing)}.")
    if excluded := [flag for flag, is_given in _EXCLUDED.items() if is_given(arguments)]:
        raise SystemExit(
            f"--flashmoa-kv-cache off does not go with {', '.join(excluded)}. Start without one of "
            "them."
        )


def create_buffers(original: Callable[..., None], pool: Any) -> None:
    """Create one layer's buffers for all layers; wraps ``MHATokenToKVPool._create_buffers``."""
    if not is_on() or _has_scales(pool):
        original(pool)
        return
    layers, pool.layer_num = pool.layer_num, 1
    try:
        original(pool)
    finally:
        pool.layer_num = layers
    pool.k_buffer, pool.v_buffer = pool.k_buffer * layers, pool.v_buffer * layers
    pool.flashmoa_one_layer = True


def get_kv_size_bytes(original: Callable[..., tuple[int, int]], pool: Any) -> tuple[int, int]:
    """Count shared buffers once; wraps ``MHATokenToKVPool.get_kv_size_bytes``."""
    keys, values = original(pool)
    layers = len(pool.k_buffer) if getattr(pool, "flashmoa_one_layer", False) else 1
    return keys // layers, values // layers


def verify(scheduler: Any) -> None:
    """Check that the scheduler and the model can do without a KV cache.

    Raises: SystemExit if the scheduler cuts prompts into chunks, if the pool has scales or is not
        a plain one, or if layers of the model share KV.
    """
    if not is_on():
        return
    if scheduler.chunked_prefill_size is not None:
        raise SystemExit("--flashmoa-kv-cache off needs --chunked-prefill-size -1.")
    problem = "--flashmoa-kv-cache off does not work with this model; start without it: "
    pool = _pool(scheduler)
    if _has_scales(pool):
        raise SystemExit(
            "--flashmoa-kv-cache off does not go with KV that has scales (--kv-cache-dtype)."
        )
    if not getattr(pool, "flashmoa_one_layer", False):
        raise SystemExit(f"{problem}SGLang has its KV in a {type(pool).__name__}.")
    from sglang.srt.layers.radix_attention import RadixAttention

    modules = scheduler.tp_worker.model_runner.model.modules()
    layers = [module.layer_id for module in modules if isinstance(module, RadixAttention)]
    if len(set(layers)) < len(layers):
        raise SystemExit(f"{problem}some of its layers read the KV of others.")


def check(message: Any) -> None:
    """Refuse a request that needs a second forward.

    Args: message: SGLang's message of the request for its scheduler.
    Raises: ValueError if it does; SGLang answers 400.
    """
    if not is_on():
        return
    new_tokens = message.sampling_params.max_new_tokens
    if new_tokens is None or new_tokens > 1:
        raise ValueError(f"{KEEPS_NONE}: ask for max_new_tokens 0 or 1, not {new_tokens}.")
    if message.session_params is not None:
        raise ValueError(f"{KEEPS_NONE}, so it has no sessions; leave session_params out.")


def bytes_of(scheduler: Any) -> int | None:
    """Return the bytes of this rank's KV pool; ``None`` if the pool has no such method."""
    get_size = getattr(_pool(scheduler), "get_kv_size_bytes", None)
    if get_size is None:
        return None
    size = get_size()
    return int(sum(size) if isinstance(size, tuple) else size)


def peak_memory(scheduler: Any) -> int:
    """Return this process's peak bytes on its GPU, or in memory if it has no GPU."""
    if not str(_pool(scheduler).device).startswith("cuda"):
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    import torch

    return torch.cuda.max_memory_allocated()


def _has_scales(pool: Any) -> bool:
    """Return whether SGLang quantises the pool, so that each layer also has scales."""
    # SGLang 0.5.12 lacks the attribute; its quantised pool is of another class.
    return getattr(pool, "is_quantized_kv_cache", False)


def _pool(scheduler: Any) -> Any:
    return scheduler.token_to_kv_pool_allocator.get_kvcache()
