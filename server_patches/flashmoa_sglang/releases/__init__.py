"""Everything that depends on which SGLang release is installed, and nothing else.

The rest of the plugin touches what moves between releases only through these names.
``v0_5_18`` has them all and says what each is for; the other modules have what is different
in theirs. A release between two modules is served by the older one, which the checks at
start (``plugin.py``) accept or refuse.
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from flashmoa_sglang.releases import v0_5_18

TESTED = ("0.5.12.post1", "0.5.18", "0.5.23")
# The oldest first.
_MODULES = {(0, 5, 12): "v0_5_12", (0, 5, 18): "v0_5_18", (0, 5, 23): "v0_5_23"}


def installed() -> str:
    """The installed SGLang release."""
    return version("sglang")


def module_for(release: str) -> str:
    """The name of the module that serves a release."""
    number = tuple(int(part) for part in re.findall(r"\d+", release)[:3])
    known = [first for first in _MODULES if first <= number]
    return _MODULES[max(known, default=min(_MODULES))]


def _installed_module() -> Any:
    try:
        name = module_for(installed())
    except PackageNotFoundError:  # Parts of the plugin are of use without SGLang.
        return v0_5_18
    return import_module(f"{__name__}.{name}")


_release = _installed_module()


def _chosen(name: str) -> Any:
    return getattr(_release, name, getattr(v0_5_18, name))


# Starting SGLang.
prepare_import = _chosen("prepare_import")
server_arguments = _chosen("server_arguments")
# Hooks.
STREAM_OUTPUT = _chosen("STREAM_OUTPUT")
MENDED = _chosen("MENDED")
# The scheduler.
running_batch = _chosen("running_batch")
new_batch = _chosen("new_batch")
publish = _chosen("publish")
dp_rank = _chosen("dp_rank")
# Between processes.
tokenizer_channel = _chosen("tokenizer_channel")
to_scheduler = _chosen("to_scheduler")
wrapped = _chosen("wrapped")
# Requests.
salted = _chosen("salted")
render_before_encoding = _chosen("render_before_encoding")
# The CPU platform.
cpu_platform = _chosen("cpu_platform")
write_location = _chosen("write_location")


class Pin(NamedTuple):
    """A lock on a radix tree node and what unlocking it needs."""

    node: Any
    unlock: Any


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
    tokenizer_channel(scheduler).send_output(message, req)


def handle(dispatcher: Any, message_type: type, handler: Any) -> None:
    """Register a handler with SGLang's dispatcher of messages by type."""
    dispatcher._mapping[message_type] = handler
