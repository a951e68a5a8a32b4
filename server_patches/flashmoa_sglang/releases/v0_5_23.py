"""SGLang 0.5.23.

Chat prompts are rendered and tokenised in a worker thread there, out of sight of the request's
context: a chat request with a prompt stream is tokenised again. Its KV is used all the same.
Long prompts are encoded in parts, but not where a tokenizer's ``encode`` was replaced, as the
plugin does.
"""

# What this release has and the one in the type checker's environment has not.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from flashmoa_sglang.releases.base import Release


class Release0523(Release):
    """SGLang 0.5.23, which aborts abandoned requests by itself."""

    CREATE_OFFLOADER = "sglang.srt.model_executor.model_runner.create_offloader"

    def resolved(self, server_args: Any) -> Any:
        # The arguments stay as they were given; what SGLang chose is declared beside them.
        from sglang.srt.arg_groups.overrides import resolved_view

        return resolved_view(server_args)

    def data_parallel_ranks(self, arguments: Any) -> int:
        # Whole replicas, or divided attention, which has a number of its own.
        return arguments.dp_size * arguments.attn_dp_size

    def divides_attention(self, arguments: Any) -> bool:
        from sglang.srt.runtime_context import attn_dp_enabled_of

        return attn_dp_enabled_of(arguments)

    def publish(self, scheduler: Any, req: Any) -> None:
        # The prefix is a length here; the slots are in the request's row.
        prefix = req.prefix_len
        scheduler.stash_chunked_request(req)
        req.prefix_len = prefix

    def check_host_cache(self, scheduler: Any) -> None:
        """Do nothing: SGLang has done so before it looks for a batch."""

    def release_prefetch(self, scheduler: Any, req: Any) -> None:
        # With everything else that the cache keeps for the request.
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
        # The slots of a prefix are looked up in the radix tree when a batch is built, where KV that
        # the same batch computes is not yet: one level of what is shared per forward.
        return False

    def cached_tokens(self, req: Any) -> int:
        return req.prefix_len

    def computed_until(self, req: Any) -> int:
        return req.extend_end

    def shrink_prefix(self, req: Any, length: int) -> None:
        req.prefix_len = length

    def matched_tokens(self, tree_cache: Any, req: Any) -> int:
        from sglang.srt.mem_cache.common import match_kv_cache

        match_kv_cache(req, tree_cache)
        return req.num_matched_prefix_tokens

    def cpu_platform(self) -> type:
        from sglang.srt.platforms.cpu import CpuDeviceMixin
        from sglang.srt.platforms.interface import SRTPlatform

        # SGLang's two classes name a parameter of one method differently.
        class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # pyright: ignore[reportIncompatibleMethodOverride]
            """SGLang's own, whose pool and allocator classes are right for a CPU."""

        return CpuPlatform
