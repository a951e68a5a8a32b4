"""SGLang 0.5.18, in which requests share tokens within a forward."""

# The type checker has another release, which lacks some attributes of this one.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from flashmoa_sglang.releases.v0_5_19 import Release0519

# Attention backends whose ``forward_extend`` writes the keys and values of a whole batch to the KV
# pool, and then reads all of them there. FlashInfer's, by default, attends to each request's new
# tokens (ragged) and to its prefix in the pool, and writes the new ones only afterwards; the MLA
# paths do the like.
_WRITE_FIRST = {"torch_native", "triton", "fa3", "trtllm_mha"}


class Release0518(Release0519):
    CREATE_OFFLOADER = "sglang.srt.model_executor.model_runner.create_offloader_from_server_args"

    def resolve_arguments(self, server_args: Any) -> Any:
        return server_args

    def refuses_mixed(self, arguments: Any) -> bool:
        return bool(
            arguments.attn_cp_size > 1 or arguments.dllm_algorithm or arguments.enable_hisparse
        )

    def shares_within_forward(self, scheduler: Any) -> bool:
        arguments = scheduler.server_args
        backend = arguments.prefill_attention_backend or arguments.attention_backend
        return (
            backend in _WRITE_FIRST
            and not scheduler.model_config.attention_arch.name.startswith("MLA")
            and scheduler.spec_algorithm.is_none()
        )

    def grow_prefix(self, req: Any, count: int) -> None:
        import torch

        # The slots are set once the batch is built.
        prefix = req.prefix_indices
        self._set_prefix(req, torch.cat([prefix, prefix.new_zeros(count)]))

    def shrink_prefix(self, req: Any, length: int) -> None:
        self._set_prefix(req, req.prefix_indices[:length])

    def _set_prefix(self, req: Any, indices: Any) -> None:
        req.prefix_indices = indices

    def adopt(self, scheduler: Any, req: Any, start: int, end: int) -> None:
        """Set the request's table row, prefix and lock as if it had matched that KV before."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        tree = scheduler.tree_cache
        match = tree.match_prefix(MatchPrefixParams(key=self.radix_key(req, end)))
        slots = match.device_indices
        if len(slots) != end:
            raise AssertionError(f"{len(slots)} of {end} shared tokens are in the radix tree")
        scheduler.req_to_token_pool.write((req.req_pool_idx, slice(start, end)), slots[start:])
        req.prefix_indices = slots
        req.cache_protected_len = end
        tree.dec_lock_ref(req.last_node)
        tree.inc_lock_ref(match.last_device_node)
        req.last_node = match.last_device_node
