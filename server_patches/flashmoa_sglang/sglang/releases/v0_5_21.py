"""SGLang 0.5.21, where a request has the slots of its prefix as a tensor."""

# The type checker has another release, which lacks some attributes of this one.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from flashmoa_sglang.sglang.releases.v0_5_22 import Release0522


class Release0521(Release0522):
    MIXING_POOLS = frozenset({"MHATokenToKVPool", "MLATokenToKVPool"})
    MIXING_GRAPHS = ("disabled", "breakable")
    CHAT_ENCODER = None

    def prepare_tokenizer(self, tokenizer: Any) -> None:
        pass

    def data_parallel_ranks(self, arguments: Any) -> int:
        return arguments.dp_size or 1

    def reserve_pages(self, adder: Any) -> None:
        # SGLang counts one token for each decode. If the pool then lacks a page, SGLang ends.
        pages = (adder.page_size - 1) * len(adder.running_batch.reqs)
        self._reserve(adder, pages)

    def _reserve(self, adder: Any, tokens: int) -> None:
        adder.memory_budget.total_offset += tokens
        adder.memory_budget.current_offset += tokens

    def publish(self, scheduler: Any, req: Any) -> None:
        prefix = req.prefix_indices
        scheduler.stash_chunked_request(req)
        req.prefix_indices = prefix

    def reserved_output(self, scheduler: Any, req: Any) -> float:
        return scheduler.new_token_ratio_tracker.current

    def cached_tokens(self, req: Any) -> int:
        return len(req.prefix_indices)

    def computed_until(self, req: Any) -> int:
        return req.extend_range.end

    def matched_length(self, prefix_match: Any) -> int:
        return len(prefix_match.device_indices)

    def matched_tokens(self, tree_cache: Any, req: Any) -> int:
        from sglang.srt.managers.schedule_policy import match_prefix_for_req

        match_prefix_for_req(tree_cache, req, include_req=True)
        return req.num_matched_prefix_tokens
