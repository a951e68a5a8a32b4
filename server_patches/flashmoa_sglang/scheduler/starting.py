"""Finds the requests of clients that could start in the step that is being planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashmoa_sglang.releases import RELEASE
from flashmoa_sglang.scheduler.request import total_tokens, uncached_tokens

# Forwards of more tokens than this are not told apart.
_LARGE_FORWARD = 8192


def can_start(scheduler: Any, running: Any) -> bool:
    """Return whether a request of a client could join a batch that is built now."""
    if scheduler.chunked_req is not None or scheduler.grammar_manager.has_waiting_grammars():
        return True
    if not scheduler.waiting_queue:
        return False
    if scheduler.enable_priority_preemption:
        return True
    return not running.batch_is_full and scheduler.get_num_allocatable_reqs(len(running.reqs)) > 0


def starting_requests(scheduler: Any, running: Any) -> list[Any]:
    """Return the request whose prompt is cut into chunks, if any, and those with a place."""
    chunked = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    if running.batch_is_full:
        return chunked
    places = scheduler.get_num_allocatable_reqs(len(running.reqs)) - len(chunked)
    return chunked + scheduler.waiting_queue[: max(places, 0)]


def tokens_to_start(scheduler: Any, starting: Sequence[Any]) -> int:
    """Return about how many tokens requests compute in the next forwards.

    If they are more than :data:`_LARGE_FORWARD`, not all of them are counted.
    """
    tokens = 0
    for req in starting:
        if req is scheduler.chunked_req:
            tokens += total_tokens(req) - RELEASE.computed_until(req)
        else:
            tokens += uncached_tokens(scheduler.tree_cache, req)
        if tokens >= _LARGE_FORWARD:
            break
    return tokens


def can_be_mixed(scheduler: Any, starting: Sequence[Any]) -> bool:
    """Return whether SGLang can cut the prompts of all these requests and mix them with decodes.

    It mixes no prompt whose log-probabilities are asked for, nor embeddings. With deterministic
    kernels it cuts prompts only at multiples that may be longer than a ride.
    """
    return scheduler.truncation_align_size is None and not any(
        req.return_logprob or req.input_embeds is not None or req.multimodal_inputs is not None
        for req in starting
    )
