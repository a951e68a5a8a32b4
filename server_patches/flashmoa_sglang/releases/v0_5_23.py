"""SGLang 0.5.23.

This release renders and tokenises chat prompts in a worker thread, which does not have the
request's context. So a chat request with a prompt stream is tokenised again; it uses the stream's
KV all the same. SGLang encodes long prompts in parts, but not if a tokenizer's ``encode`` was
replaced, as the plugin does.
"""

# The type checker has 0.5.18, which lacks some attributes of this release.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from flashmoa_sglang.releases.base import Release


class Release0523(Release):
    """SGLang 0.5.23, which by itself aborts requests whose client has disconnected."""

    # It looks for room before it mixes decodes in, and keeps the states of the prefill's rows.
    MIXING_POOLS = Release.MIXING_POOLS | {"SWAKVPool", "HybridLinearKVPool"}
    LOSES_STATES = False
    SCHEDULER_FIXES = ()
    HTTP_FIXES = ()
    CREATE_OFFLOADER = "sglang.srt.model_executor.model_runner.create_offloader"

    def resolve_arguments(self, server_args: Any) -> Any:
        # ``server_args`` stays as the user gave it; SGLang keeps its own choices separately.
        from sglang.srt.arg_groups.overrides import resolved_view

        return resolved_view(server_args)

    def why_no_rides(self, scheduler: Any) -> str:
        graphs = self.resolve_arguments(scheduler.server_args).cuda_graph_config.prefill.backend
        if graphs not in ("disabled", "breakable", "full"):
            return f"SGLang refuses it with {graphs} CUDA graphs of prefills"
        return super().why_no_rides(scheduler)

    def refuses_mixed(self, arguments: Any) -> bool:
        return bool(
            super().refuses_mixed(arguments)
            or arguments.dsa_prefill_backend == "flashmla_sparse_q8"
            or arguments.enable_encoder_swa_bounded_replay
            or arguments.enable_megamoe_for_layernorm_sp
        )

    def copies_kv(self, scheduler: Any) -> bool:
        arguments = self.resolve_arguments(scheduler.server_args)
        return super().copies_kv(scheduler) or arguments.enable_unified_cache_external_linker

    def data_parallel_ranks(self, arguments: Any) -> int:
        # The first is the number of replicas, the second that of DP attention's ranks.
        return arguments.dp_size * arguments.attn_dp_size

    def divides_attention(self, arguments: Any) -> bool:
        from sglang.srt.runtime_context import attn_dp_enabled_of

        return attn_dp_enabled_of(arguments)

    def publish(self, scheduler: Any, req: Any) -> None:
        # In this release the prefix is a length; the slots are in the request's row of the table.
        prefix = req.prefix_len
        scheduler.stash_chunked_request(req)
        req.prefix_len = prefix

    def reserve_pages(self, adder: Any) -> None:
        """Do nothing: this release looks for room before it mixes decodes in."""

    def check_host_cache(self, scheduler: Any) -> None:
        """Do nothing: this release checks before it looks for a batch."""

    def release_prefetch(self, scheduler: Any, req: Any) -> None:
        # This releases everything that the cache keeps for the request.
        scheduler._release_aborted_request(req)

    def dp_rank(self, scheduler: Any) -> int:
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().dp_rank or 0

    def pipeline_stages(self, scheduler: Any) -> int:
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().pp_size

    def reserved_output(self, scheduler: Any, req: Any) -> float:
        # An answer of a fixed length does not end early.
        return 1.0 if req.sampling_params.ignore_eos else super().reserved_output(scheduler, req)

    def shares_within_forward(self, scheduler: Any) -> bool:
        # SGLang looks the slots of a prefix up in the radix tree when it builds a batch, and KV
        # that the same batch computes is not in the tree yet. So each forward computes one level of
        # a shared prefix.
        return False

    def cached_tokens(self, req: Any) -> int:
        return req.prefix_len

    def computed_until(self, req: Any) -> int:
        return req.extend_end

    def shrink_prefix(self, req: Any, length: int) -> None:
        req.prefix_len = length

    def matched_slots(self, tree_cache: Any, prefix_match: Any) -> Any:
        return tree_cache.path_device_indices(prefix_match.last_device_node)

    def matched_length(self, prefix_match: Any) -> int:
        return prefix_match.device_prefix_len

    def matched_tokens(self, tree_cache: Any, req: Any) -> int:
        from sglang.srt.mem_cache.common import match_kv_cache

        match_kv_cache(req, tree_cache)
        return req.num_matched_prefix_tokens

    def cpu_platform(self, pools: type) -> type:
        from sglang.srt.platforms.cpu import CpuDeviceMixin
        from sglang.srt.platforms.interface import SRTPlatform

        # SGLang's own classes of the pool and the allocator are right for a CPU here.
        return type("CpuPlatform", (CpuDeviceMixin, SRTPlatform), {})
