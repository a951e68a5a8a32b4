"""``RequestState``, the plugin's state of a request, and functions that read SGLang's requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashmoa_sglang.messages import RequestMark
from flashmoa_sglang.sglang.releases import RELEASE


@dataclass(slots=True)
class RequestState:
    """The plugin's state of a request in a scheduler, as ``req.flashmoa``; sizes in tokens.

    Attributes:
        mark: the plugin's mark on the request, if any.
        queued_at: the engine's work when the request was queued, in prefill tokens.
        uncached: number of tokens that were not in the radix tree at the last match.
        unshared: number of uncached tokens that no earlier request in the queue computes.
        first_wait: length of the cached prefix when the request first waited for another one to
            compute tokens that both need.
        last_wait: length of the cached prefix at its last such wait.
        delay: estimated seconds by which an increment made requests that decode wait for their next
            tokens; ``None`` if the engine has not measured its costs.
    """

    mark: RequestMark | None = None
    queued_at: float | None = None
    uncached: int | None = None
    unshared: int | None = None
    first_wait: int | None = None
    last_wait: int | None = None
    delay: float | None = 0.0

    @property
    def stream(self) -> str | None:
        return self.mark.stream if self.mark is not None else None

    @property
    def increment_of(self) -> str | None:
        """The prompt stream that the request prefills, if it is an increment."""
        mark = self.mark
        return mark.stream if mark is not None and not (mark.final or mark.opens) else None


def state_of(req: Any) -> RequestState:
    """Return the plugin's state of a request; create it the first time."""
    state = getattr(req, "flashmoa", None)
    if state is None:
        state = req.flashmoa = RequestState(RequestMark.read(req.sampling_params.custom_params))
    return state


def is_increment(req: Any) -> bool:
    """Return whether a request prefills a prompt stream, so that no client waits for it."""
    return state_of(req).increment_of is not None


def is_shareable(req: Any) -> bool:
    """Return whether the request's KV depends only on its tokens and is kept in the radix tree."""
    return (
        req.session is None
        and req.input_embeds is None
        and req.positional_embed_overrides is None
        and req.multimodal_inputs is None
        and not RELEASE.needs_host_load(req)
        # SGLang keeps no KV of requests that a client marks as warm-ups of a PD pair.
        and not getattr(req, "skip_radix_cache_insert", False)
        and req.to_finish is None
    )


def total_tokens(req: Any) -> int:
    """Return the number of tokens of a request's prompt and of its answer so far."""
    return len(req.origin_input_ids) + len(req.output_ids)


def output_left(req: Any) -> int:
    """Return for how many more output tokens SGLang reserves room: at most 4,096."""
    left = (req.sampling_params.max_new_tokens or 0) - len(req.output_ids)
    return min(max(0, left), 4096)


def uncached_tokens(tree_cache: Any, req: Any) -> int:
    """Return how many tokens of a request were not in the radix tree when it was first matched.

    It is matched only once, because the number changes little while the request waits.
    """
    state = state_of(req)
    if state.uncached is None:
        state.uncached = RELEASE.uncached_tokens(tree_cache, req)
    return state.uncached
