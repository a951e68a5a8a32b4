"""Everything that depends on which SGLang release is installed, and nothing else.

The rest of the plugin touches SGLang's scheduler only through these functions, so supporting
another release means adding a branch here.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, NamedTuple

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
