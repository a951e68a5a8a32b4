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

# It aborts what nobody reads by itself (``_release_req_states_on_failure``).
MENDED: tuple[tuple[str, Callable[..., Any]], ...] = ()


def publish(scheduler: Any, req: Any) -> None:
    # The prefix is a length here; the slots are in the request's row.
    prefix = req.prefix_len
    scheduler.stash_chunked_request(req)
    req.prefix_len = prefix


def dp_rank(_scheduler: Any) -> int:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().dp_rank or 0


def cpu_platform() -> type:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.interface import SRTPlatform

    class CpuPlatform(CpuDeviceMixin, SRTPlatform):
        """Pool and allocator classes default to the in-tree ones."""

    return CpuPlatform
