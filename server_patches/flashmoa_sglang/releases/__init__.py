"""Everything that depends on which SGLang release is installed, and nothing else.

The rest of the plugin touches what moves between releases only through these names.
``v0_5_18`` has them all and says what each is for; the other modules have what is different
in theirs. A release between two modules is served by the older one, which the checks at
start (``plugin.py``) accept or refuse.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

from flashmoa_sglang.releases import v0_5_18

if TYPE_CHECKING:
    from collections.abc import Hashable

TESTED = ("0.5.12.post1", "0.5.18", "0.5.23")
# The oldest first.
_MODULES = {(0, 5, 12): "v0_5_12", (0, 5, 18): "v0_5_18", (0, 5, 23): "v0_5_23"}


def installed() -> str:
    """The installed SGLang release."""
    return version("sglang")


def too_old(release: str) -> str | None:
    """What to tell whoever has a release from before the oldest tested one."""
    number = _number(release)
    # A build from a checkout without tags calls itself 0.0.0; its hooks are checked at start.
    if number >= min(_MODULES) or not any(number):
        return None
    return (
        f"SGLang {release} is too old for flashmoa-sglang. Tested releases: {', '.join(TESTED)}. "
        "Install one of them."
    )


def module_for(release: str) -> str:
    """The name of the module that serves a release."""
    number = _number(release)
    known = [first for first in _MODULES if first <= number]
    return _MODULES[max(known, default=min(_MODULES))]


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:3])


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
# SGLang's arguments.
resolved = _chosen("resolved")
NO_GRAPHS = _chosen("NO_GRAPHS")
graphs_are_off = _chosen("graphs_are_off")
data_parallel_ranks = _chosen("data_parallel_ranks")
steps_together = _chosen("steps_together")
# Hooks.
STREAM_OUTPUT = _chosen("STREAM_OUTPUT")
CREATE_OFFLOADER = _chosen("CREATE_OFFLOADER")
MENDED = _chosen("MENDED")
MENDED_IN_SCHEDULER = _chosen("MENDED_IN_SCHEDULER")
forgetting = _chosen("forgetting")
# The scheduler.
running_batch = _chosen("running_batch")
new_batch = _chosen("new_batch")
no_batch = _chosen("no_batch")
running_after = _chosen("running_after")
publish = _chosen("publish")
look_after_host_cache = _chosen("look_after_host_cache")
release_prefetch = _chosen("release_prefetch")
release_metadata_buffer = _chosen("release_metadata_buffer")
dp_rank = _chosen("dp_rank")
pipeline_stages = _chosen("pipeline_stages")
# Requests in the scheduler.
kept_free = _chosen("kept_free")
shares_within_forward = _chosen("shares_within_forward")
from_host = _chosen("from_host")
namespace = _chosen("namespace")
cached_tokens = _chosen("cached_tokens")
longest_prefix = _chosen("longest_prefix")
computed_until = _chosen("computed_until")
tokens = _chosen("tokens")
grow_prefix = _chosen("grow_prefix")
shrink_prefix = _chosen("shrink_prefix")
radix_key = _chosen("radix_key")
uncached = _chosen("uncached")
# Between processes.
tokenizer_channel = _chosen("tokenizer_channel")
to_scheduler = _chosen("to_scheduler")
wrapped = _chosen("wrapped")
# Requests and prompts in the HTTP process.
namespace_fields = _chosen("namespace_fields")
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


def pin_cached(tree_cache: Any, req: Any) -> Pin:
    """Lock the nodes that hold the prompt of a request which is through against eviction."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    key = radix_key(req, len(req.origin_input_ids))
    node = tree_cache.match_prefix(MatchPrefixParams(key=key)).last_device_node
    return Pin(node, tree_cache.inc_lock_ref(node).to_dec_params())


def unpin(tree_cache: Any, pinned: Pin) -> None:
    tree_cache.dec_lock_ref(pinned.node, pinned.unlock)


def free_tokens(tree_cache: Any) -> int:
    """KV slots that are free or could be freed by eviction."""
    allocator = tree_cache.token_to_kv_pool_allocator
    return allocator.available_size() + tree_cache.evictable_size()


def can_pin(scheduler: Any) -> bool:
    """Whether a request's KV may be published before its forward, and locked when idle.

    Not in hybrid pools, which keep a state or a window beside it, nor without a radix tree.
    """
    return not (
        scheduler.disable_radix_cache
        or getattr(scheduler, "is_hybrid_swa", False)
        or getattr(scheduler, "is_hybrid_ssm", False)
    )


def role(scheduler: Any) -> str:
    """What the engine is in a PD pair: ``prefill``, ``decode``, or ``null`` where there is none."""
    return scheduler.server_args.disaggregation_mode


def unsent() -> dict[str, Any]:
    """The fields of a ``GenerateReqInput`` that a prefill engine of a PD pair computes and sends to
    no decode engine: those of SGLang's own warm-up."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    # Its room says nothing, but that it is in one.
    return {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": secrets.randbelow(1 << 30)}


def keep_kv(req: Any) -> None:
    """Have the KV of a request that is :func:`unsent` in the radix tree, unlike a warm-up's."""
    req.skip_radix_cache_insert = False


def let_go(scheduler: Any, req: Any) -> None:
    """Give back what a request has beside its place in the queue, which it has left unserved."""
    release_prefetch(scheduler, req)
    if role(scheduler) == "prefill":
        release_metadata_buffer(scheduler, req)


def is_shareable(req: Any) -> bool:
    """Whether equal tokens mean equal KV, and the radix tree is where it is kept."""
    return (
        req.session is None
        and req.input_embeds is None
        and req.positional_embed_overrides is None
        and req.multimodal_inputs is None
        and not from_host(req)
        and req.to_finish is None
    )


def last_node(req: Any) -> Hashable:
    """Where the request's cached prefix ends in the radix tree."""
    return req.last_node


def adopt(scheduler: Any, req: Any, start: int, end: int) -> None:
    """Point a request of a built batch to KV that has been published meanwhile.

    As if it had matched that when the batch was built: table row, prefix and lock.
    """
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    tree = scheduler.tree_cache
    match = tree.match_prefix(MatchPrefixParams(key=radix_key(req, end)))
    slots = match.device_indices
    if len(slots) != end:
        raise AssertionError(f"{len(slots)} of {end} shared tokens are in the radix tree")
    scheduler.req_to_token_pool.write((req.req_pool_idx, slice(start, end)), slots[start:])
    req.prefix_indices = slots
    req.cache_protected_len = end
    tree.dec_lock_ref(req.last_node)
    tree.inc_lock_ref(match.last_device_node)
    req.last_node = match.last_device_node


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
        and pipeline_stages(scheduler) == 1
    )


@contextmanager
def mixing(scheduler: Any, size: int) -> Iterator[None]:
    """The prefill batch built inside is mixed with the decodes, ``size`` tokens in all."""
    usual = scheduler.is_mixed_chunk
    scheduler.is_mixed_chunk = True
    try:
        with chunking(scheduler, size):
            yield
    finally:
        scheduler.is_mixed_chunk = usual


@contextmanager
def chunking(scheduler: Any, size: int) -> Iterator[None]:
    """The prefill batch built inside has at most so many tokens, unless SGLang's is lower."""
    usual = scheduler.chunked_prefill_size
    if usual is not None:
        scheduler.chunked_prefill_size = min(size, usual)
    try:
        yield
    finally:
        scheduler.chunked_prefill_size = usual


def go_on() -> Any:
    """What ``PrefillAdder.add_one_req`` answers for: not this one, but ask for others."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.CONTINUE


def is_without_room(result: Any) -> bool:
    """Whether ``PrefillAdder.add_one_req`` says that the KV pool is short."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return result == AddReqResult.NO_TOKEN


def to_tokenizer(scheduler: Any, message: Any, req: Any = None) -> None:
    """Send a message of ours, or SGLang's own, to the HTTP process."""
    tokenizer_channel(scheduler).send_output(message, req)


def handle(dispatcher: Any, message_type: type, handler: Any) -> None:
    """Register a handler with SGLang's dispatcher of messages by type."""
    dispatcher._mapping[message_type] = handler
