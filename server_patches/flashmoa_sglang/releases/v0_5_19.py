"""SGLang 0.5.19."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from flashmoa_sglang.releases.v0_5_20 import Release0520


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


class Release0519(Release0520):
    CHECKS_SESSIONS = False
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

    def release_prefetch(self, scheduler: Any, req: Any) -> None:
        if scheduler.enable_hicache_storage:
            scheduler.tree_cache.release_aborted_request(req.rid)
