"""What the plugin keeps on a request of SGLang's, and what it reads of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashmoa_sglang.messages import RequestMark
from flashmoa_sglang.releases import RELEASE

# SGLang reserves at most this many output tokens when it admits a request.
_RESERVED_OUTPUT = 4096


@dataclass(slots=True)
class RequestState:
    """What the plugin keeps on one request in a scheduler, as ``req.flashmoa``.

    ``mark``: why the plugin sent or touched the request, if it did. ``held``: steps in which it
    was passed over. ``found_no_room``: SGLang found no room in the KV pool for this increment.
    ``queued_at``: the engine's work, in prefill tokens, when the request was queued.

    In tokens: ``uncached``, what was not in the radix tree when that was last looked up;
    ``unshared``, what of this no request before it in the queue computes; ``first_wait``, where its
    cached prefix ended when it first waited for another request to compute what both need, and
    ``last_wait``, where it ended the last time.
    """

    mark: RequestMark | None = None
    held: int = 0
    found_no_room: bool = False
    queued_at: float | None = None
    uncached: int | None = None
    unshared: int | None = None
    first_wait: int | None = None
    last_wait: int | None = None

    @property
    def stream(self) -> str | None:
        """The prompt stream that the request belongs to, if any."""
        return self.mark.stream if self.mark is not None else None

    @property
    def increment_of(self) -> str | None:
        """The prompt stream that the request prefills, if it is an increment of one."""
        return self.stream if self.mark is not None and not self.mark.final else None


def state_of(req: Any) -> RequestState:
    """Return what the plugin keeps on a request."""
    state = getattr(req, "flashmoa", None)
    if state is None:
        state = req.flashmoa = RequestState(RequestMark.read(req.sampling_params.custom_params))
    return state


def is_increment(req: Any) -> bool:
    """Return whether a request prefills a prompt stream, so that no client waits for its answer."""
    return state_of(req).increment_of is not None


def is_shareable(req: Any) -> bool:
    """Return whether equal tokens mean equal KV, and the radix tree is where it is kept."""
    return (
        req.session is None
        and req.input_embeds is None
        and req.positional_embed_overrides is None
        and req.multimodal_inputs is None
        and not RELEASE.needs_host_load(req)
        and req.to_finish is None
    )


def total_tokens(req: Any) -> int:
    """Return how many tokens a request has: its prompt and what it has decoded."""
    return len(req.origin_input_ids) + len(req.output_ids)


def output_left(req: Any) -> int:
    """Return for how many more output tokens SGLang reserves room."""
    left = (req.sampling_params.max_new_tokens or 0) - len(req.output_ids)
    return min(max(0, left), _RESERVED_OUTPUT)


def uncached_tokens(tree_cache: Any, req: Any) -> int:
    """Return how many tokens of a request were not in the radix tree when it was looked up.

    It is looked up once: the number changes little while the request waits.
    """
    state = state_of(req)
    if state.uncached is None:
        state.uncached = RELEASE.uncached_tokens(tree_cache, req)
    return state.uncached
