"""SGLang 0.5.23, where it differs from 0.5.18.

Chat prompts are rendered and tokenised in a worker thread there, out of sight of the request's
context: a chat request with a prompt stream is tokenised anew. Its KV is used all the same.
Long prompts are encoded in parts, but not where a tokenizer's ``encode`` was replaced, as the
plugin does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

CREATE_OFFLOADER = "sglang.srt.model_executor.model_runner.create_offloader"
# It aborts what nobody reads by itself (``_release_req_states_on_failure``).
MENDED: tuple[tuple[str, Callable[..., Any]], ...] = ()
MENDED_IN_SCHEDULER: tuple[tuple[str, Callable[..., Any]], ...] = ()


def resolved(server_args: Any) -> Any:
    # They stay as they were given; what is chosen is declared beside them.
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)


def data_parallel_ranks(arguments: Any) -> int:
    # Whole replicas, or divided attention, which has a number of its own.
    return arguments.dp_size * arguments.attn_dp_size


def steps_together(arguments: Any) -> bool:
    from sglang.srt.runtime_context import attn_dp_enabled_of

    return (
        arguments.pp_size > 1
        or attn_dp_enabled_of(arguments)
        or arguments.moe_a2a_backend != "none"
        or arguments.moe_dense_tp_size is not None
    )


def publish(scheduler: Any, req: Any) -> None:
    # The prefix is a length here; the slots are in the request's row.
    prefix = req.prefix_len
    scheduler.stash_chunked_request(req)
    req.prefix_len = prefix


def look_after_host_cache(_scheduler: Any) -> None:
    """It does so before it looks for a batch."""


def release_prefetch(scheduler: Any, req: Any) -> None:
    # With whatever else the cache keeps for it.
    scheduler._release_aborted_request(req)


def dp_rank(_scheduler: Any) -> int:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().dp_rank or 0


def pipeline_stages(_scheduler: Any) -> int:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().pp_size


def kept_free(scheduler: Any, req: Any) -> float:
    # An answer of a fixed length does not end early.
    return 1.0 if req.sampling_params.ignore_eos else scheduler.new_token_ratio_tracker.current


def shares_within_forward(_scheduler: Any) -> bool:
    # The slots of a prefix are looked up in the radix tree when a batch is built, where KV that
    # the same batch computes is not yet: one level of what is shared per forward.
    return False


def cached_tokens(req: Any) -> int:
    return req.prefix_len


def computed_until(req: Any) -> int:
    return req.extend_end


def shrink_prefix(req: Any, length: int) -> None:
    req.prefix_len = length


def uncached(tree_cache: Any, req: Any) -> int:
    from sglang.srt.mem_cache.common import match_kv_cache

    match_kv_cache(req, tree_cache)
    total = len(req.origin_input_ids) + len(req.output_ids)
    return total - req.num_matched_prefix_tokens


def cpu_platform() -> type:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.interface import SRTPlatform

    class CpuPlatform(CpuDeviceMixin, SRTPlatform):
        """Pool and allocator classes default to the in-tree ones."""

    return CpuPlatform
