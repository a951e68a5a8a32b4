"""SGLang 0.5.18."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.releases.base import Release

if TYPE_CHECKING:
    from collections.abc import Callable


def abort_abandoned(original: Callable[..., None], manager: Any, obj: Any) -> None:
    """Abort requests whose client is gone: ``TokenizerManager._discard_pending_req_states``.

    SGLang drops such a request's state, and its abort, two seconds later, then finds nothing to
    abort: the request would decode to its last token.
    """
    # Not for a request that was refused: it never ran, and SGLang aborts by prefix of the id.
    if isinstance(sys.exc_info()[1], asyncio.CancelledError | GeneratorExit):
        rids = [obj.rid] if isinstance(obj.rid, str) else obj.rid
        for rid in rids or ():
            manager.abort_request(rid)
    original(manager, obj)


def token_ids_logprobs(
    original: Callable[..., Any],
    logprobs: Any,
    token_ids_logprobs_list: Any,
    stage: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Give each request of a decode step a tensor: around ``get_token_ids_logprobs_raw``.

    Under the overlap schedule SGLang turns all of them into lists later, and a list that stands for
    a request which asked for none ends the scheduler: a scored prompt beside any other request.
    """
    values, ids = original(logprobs, token_ids_logprobs_list, stage, *args, **kwargs)
    if kwargs.get("no_copy_to_cpu") and stage.name == "DECODE":
        none = logprobs.new_empty((0,))
        asked = zip(token_ids_logprobs_list, values, strict=True)
        values = [none if tokens is None else row for tokens, row in asked]
    return values, ids


class Release0518(Release):
    """SGLang 0.5.18."""

    SCHEDULER_FIXES = (
        ("sglang.srt.layers.logprob_processor.get_token_ids_logprobs_raw", token_ids_logprobs),
    )
    HTTP_FIXES = (
        (
            "sglang.srt.managers.tokenizer_manager.TokenizerManager._discard_pending_req_states",
            abort_abandoned,
        ),
    )

    def check_host_cache(self, scheduler: Any) -> None:
        from sglang.srt.runtime_context import get_memory

        if scheduler.enable_hierarchical_cache or get_memory().enable_flexkv:
            scheduler.tree_cache.check_hicache_events()

    def dp_rank(self, scheduler: Any) -> int:
        return scheduler.ps.dp_rank or 0

    def pipeline_stages(self, scheduler: Any) -> int:
        return scheduler.ps.pp_size

    def computed_until(self, req: Any) -> int:
        return req.extend_range.end

    def matched_tokens(self, tree_cache: Any, req: Any) -> int:
        from sglang.srt.managers.schedule_policy import match_prefix_for_req

        match_prefix_for_req(tree_cache, req, include_req=True)
        return req.num_matched_prefix_tokens

    def cpu_platform(self) -> type:
        from sglang.srt.platforms.cpu import CpuDeviceMixin
        from sglang.srt.platforms.interface import SRTPlatform

        # SGLang's two classes name a parameter of one method differently.
        class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # pyright: ignore[reportIncompatibleMethodOverride]
            # The base classes have neither.
            def get_mha_kv_pool_cls(self) -> type:
                from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

                return MHATokenToKVPool

            def get_paged_allocator_cls(self) -> type:
                from flashmoa_sglang.cpu.allocator import CpuPagedAllocator

                return CpuPagedAllocator

        return CpuPlatform
