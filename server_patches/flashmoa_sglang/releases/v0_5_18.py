"""SGLang 0.5.18, the reference release.

The methods of ``Release`` fit it. Added are two fixes for bugs of SGLang that break the plugin.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.releases.base import Release

if TYPE_CHECKING:
    from collections.abc import Callable


def abort_abandoned(original: Callable[..., None], manager: Any, obj: Any) -> None:
    """Abort a request when its client disconnects.

    Wraps ``TokenizerManager._discard_pending_req_states``, which SGLang calls at that moment. Stock
    SGLang forgets the request here and tries to abort it only two seconds later. By then it does
    not know the id any more and does nothing, so the request decodes to its last token.
    """
    # The original runs inside SGLang's ``except BaseException``. Only a cancelled generator means
    # that a request has to be aborted; a ValueError is a refused request, which never ran, or one
    # that SGLang has aborted. Aborting a refused one could hit others: the scheduler aborts every
    # request whose id starts with the given one.
    if isinstance(sys.exc_info()[1], asyncio.CancelledError | GeneratorExit):
        rids = [obj.rid] if isinstance(obj.rid, str) else obj.rid
        for rid in rids or ():
            manager.abort_request(rid)
    original(manager, obj)


def keep_tensors_in_logprobs(
    original: Callable[..., Any],
    logprobs: Any,
    token_ids_logprobs_list: Any,
    stage: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Put an empty tensor in place of each empty list; wraps ``get_token_ids_logprobs_raw``.

    For a request that asked for no log-probabilities SGLang puts ``[]`` among the tensors of a
    decode step. Under the overlap schedule it later calls ``.tolist()`` on each, which fails for a
    list and ends the scheduler, as soon as a scored prompt shares a step with any other request.
    """
    values, ids = original(logprobs, token_ids_logprobs_list, stage, *args, **kwargs)
    if kwargs.get("no_copy_to_cpu") and stage.name == "DECODE":
        empty = logprobs.new_empty((0,))
        pairs = zip(token_ids_logprobs_list, values, strict=True)
        values = [empty if requested_ids is None else row for requested_ids, row in pairs]
    return values, ids


class Release0518(Release):
    """SGLang 0.5.18."""

    SCHEDULER_FIXES = (
        (
            "sglang.srt.layers.logprob_processor.get_token_ids_logprobs_raw",
            keep_tensors_in_logprobs,
        ),
    )
    HTTP_FIXES = (
        (
            "sglang.srt.managers.tokenizer_manager.TokenizerManager._discard_pending_req_states",
            abort_abandoned,
        ),
    )

    def check_host_cache(self, scheduler: Any) -> None:
        from sglang.srt.runtime_context import get_memory

        # FlexKV is another cache outside of the GPU, with the same method.
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

        platform = super().cpu_platform()

        class CpuPlatform(CpuDeviceMixin, platform): ...

        return CpuPlatform
