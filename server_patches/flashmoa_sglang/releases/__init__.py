"""Everything that depends on which SGLang release is installed, and nothing else.

The rest of the plugin touches SGLang's scheduler only through these functions, so supporting
another release means adding a branch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable

    import numpy as np
    from numpy.typing import NDArray

TESTED = ("0.5.18",)


def installed() -> str:
    """The installed SGLang release."""
    return version("sglang")


class Pin(NamedTuple):
    """A lock on a radix tree node and what unlocking it needs."""

    node: Any
    unlock: Any


def publish(scheduler: Any, req: Any) -> None:
    """Put the KV of a request that is about to run into the radix tree.

    What chunked prefill does between chunks: the forward has not run yet, but everything
    that could read these slots runs behind it. The batch is already built on the request's
    prefix, so that is put back.
    """
    prefix = req.prefix_indices
    scheduler.stash_chunked_request(req)
    req.prefix_indices = prefix


def pin(scheduler: Any, req: Any) -> Pin:
    """Lock the nodes that hold a published request's KV against eviction."""
    lock = scheduler.tree_cache.inc_lock_ref(req.last_node)
    return Pin(req.last_node, lock.to_dec_params())


def unpin(tree_cache: Any, pinned: Pin) -> None:
    tree_cache.dec_lock_ref(pinned.node, pinned.unlock)


def free_tokens(tree_cache: Any) -> int:
    """KV slots that are free or could be freed by eviction."""
    allocator = tree_cache.token_to_kv_pool_allocator
    return allocator.available_size() + tree_cache.evictable_size()


def can_pin(scheduler: Any) -> bool:
    """Whether a request's KV may be published before its forward, and locked when idle.

    Not in hybrid pools, which keep a state or a window beside it.
    """
    return not getattr(scheduler, "is_hybrid_swa", False) and not getattr(
        scheduler, "is_hybrid_ssm", False
    )


# Backends that write the keys and values of a whole batch before they read any of them.
# FlashInfer's ragged prefill does not, nor do the MLA paths.
_WRITE_FIRST = {"torch_native", "triton", "fa3"}


def shares_within_forward(scheduler: Any) -> bool:
    """Whether a request may read KV that another one of its batch writes."""
    arguments = scheduler.server_args
    backend = arguments.prefill_attention_backend or arguments.attention_backend
    return (
        backend in _WRITE_FIRST
        and not scheduler.model_config.attention_arch.name.startswith("MLA")
        and scheduler.spec_algorithm.is_none()
    )


def is_shareable(req: Any) -> bool:
    """Whether equal tokens mean equal KV, and the radix tree is where it is kept."""
    return (
        req.session is None
        and req.input_embeds is None
        and req.positional_embed_overrides is None
        and req.multimodal_inputs is None
        and not req.needs_host_load_back()
        and req.to_finish is None
    )


def namespace(req: Any) -> Hashable:
    """Requests share KV only within one: cache salt, LoRA adapter."""
    return (req.extra_key, req.cache_salt)


def last_node(req: Any) -> Hashable:
    """Where the request's cached prefix ends in the radix tree."""
    return req.last_node


def cached_tokens(req: Any) -> int:
    """Length of the prefix whose KV the request need not compute."""
    return len(req.prefix_indices)


def longest_prefix(req: Any) -> int:
    """How long a prefix may be at most: one token at least is always computed."""
    return req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))


def computed_until(req: Any) -> int:
    """Where the part of the request that the batch computes ends."""
    return req.extend_range.end


def tokens(req: Any, start: int, end: int | None) -> NDArray[np.int64]:
    """A copy of the request's tokens."""
    import numpy

    return numpy.frombuffer(req.full_untruncated_fill_ids[start:end], dtype=numpy.int64)


def grow_prefix(req: Any, count: int) -> None:
    """Count ``count`` more tokens as cached; :func:`adopt` fills in where they are."""
    import torch

    req.prefix_indices = torch.cat([req.prefix_indices, req.prefix_indices.new_zeros(count)])


def shrink_prefix(req: Any, length: int) -> None:
    req.prefix_indices = req.prefix_indices[:length]


def adopt(scheduler: Any, req: Any, start: int, end: int) -> None:
    """Point a request of a built batch to KV that has been published meanwhile.

    As if it had matched that when the batch was built: table row, prefix and lock.
    """
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tree = scheduler.tree_cache
    key = RadixKey(req.full_untruncated_fill_ids[:end], req.extra_key, cache_salt=req.cache_salt)
    match = tree.match_prefix(MatchPrefixParams(key=key))
    slots = match.device_indices
    if len(slots) != end:
        raise AssertionError(f"{len(slots)} of {end} shared tokens are in the radix tree")
    scheduler.req_to_token_pool.write((req.req_pool_idx, slice(start, end)), slots[start:])
    req.prefix_indices = slots
    req.cache_protected_len = end
    tree.dec_lock_ref(req.last_node)
    tree.inc_lock_ref(match.last_device_node)
    req.last_node = match.last_device_node


def uncached(tree_cache: Any, req: Any) -> int:
    """How many tokens of a waiting request are not in the radix tree."""
    from sglang.srt.managers.schedule_policy import match_prefix_for_req

    match_prefix_for_req(tree_cache, req, include_req=True)
    total = len(req.origin_input_ids) + len(req.output_ids)
    return total - req.num_matched_prefix_tokens


def decoding(batch: Any) -> int:
    """How many requests of the running batch wait for their next token."""
    return 0 if batch.is_empty() or batch.is_prefill_only else len(batch.reqs)


def can_mix(scheduler: Any, running: Any) -> bool:
    """Whether prefill can ride in one forward with these decodes (SGLang's mixed chunk)."""
    return (
        scheduler.chunked_prefill_size is not None
        and scheduler.spec_algorithm.is_none()
        and not running.return_logprob
        and not scheduler.require_mlp_sync
        and scheduler.ps.pp_size == 1
    )


@contextmanager
def mixing(scheduler: Any, tokens: int) -> Iterator[None]:
    """The prefill batch built inside is mixed with the decodes, ``tokens`` in all."""
    usual = scheduler.is_mixed_chunk
    scheduler.is_mixed_chunk = True
    try:
        with chunking(scheduler, tokens):
            yield
    finally:
        scheduler.is_mixed_chunk = usual


@contextmanager
def chunking(scheduler: Any, tokens: int) -> Iterator[None]:
    """The prefill batch built inside has at most so many tokens, unless SGLang's is lower."""
    usual = scheduler.chunked_prefill_size
    if usual is not None:
        scheduler.chunked_prefill_size = min(tokens, usual)
    try:
        yield
    finally:
        scheduler.chunked_prefill_size = usual


def keep_nothing(req: Any) -> None:
    """A running request leaves nothing in the radix tree when it ends."""
    req.skip_radix_cache_insert = True


def go_on() -> Any:
    """What ``PrefillAdder.add_one_req`` answers for: not this one, but ask for others."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.CONTINUE


def to_tokenizer(scheduler: Any, message: Any, req: Any = None) -> None:
    """Send a message of ours, or SGLang's own, to the HTTP process."""
    scheduler.ipc_channels.send_to_tokenizer.send_output(message, req)


def to_scheduler(tokenizer_manager: Any, message: Any) -> None:
    """Send a message of ours to every scheduler."""
    from sglang.srt.managers.io_struct import sock_send, wrap_as_pickle

    sock_send(tokenizer_manager.send_to_scheduler, wrap_as_pickle(message))


def wrapped(message: Any) -> Any:
    from sglang.srt.managers.io_struct import wrap_as_pickle

    return wrap_as_pickle(message)


def handle(dispatcher: Any, message_type: type, handler: Any) -> None:
    """Register a handler with SGLang's dispatcher of messages by type."""
    dispatcher._mapping[message_type] = handler
