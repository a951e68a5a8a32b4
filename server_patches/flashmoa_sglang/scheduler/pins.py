"""``StreamPins``: locks on the KV of prompt streams in the radix tree."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from flashmoa_sglang.sglang.releases import RELEASE

logger = logging.getLogger(__name__)


class Stage(IntEnum):
    """How soon the request of a prompt stream comes; the latest first.

    ``KNOWN``: the upstream agent has not begun to write. ``TOOLS``: only the results of tools are
    missing. ``NEXT``: the upstream agent writes, or the request has come.
    """

    KNOWN = 0
    TOOLS = 1
    NEXT = 2


@dataclass(frozen=True, slots=True)
class Pin:
    """A lock on a node of the radix tree; ``unlock`` is SGLang's argument for unlocking it."""

    node: Any
    unlock: Any


def pin_published(scheduler: Any, req: Any) -> Pin:
    """Lock the nodes with a published request's KV, so that they are not evicted."""
    lock = scheduler.tree_cache.inc_lock_ref(req.last_node)
    return Pin(req.last_node, lock.to_dec_params())


def match_and_pin(tree_cache: Any, key: Any) -> tuple[Pin, int]:
    """Lock the nodes with the longest cached prefix of a key; return also its number of tokens."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    match = tree_cache.match_prefix(MatchPrefixParams(key=key))
    node = match.last_device_node
    pin = Pin(node, tree_cache.inc_lock_ref(node).to_dec_params())
    return pin, RELEASE.matched_length(match)


def can_pin(scheduler: Any) -> bool:
    """Return whether a request's KV can be published before its results come, and be pinned.

    It cannot without a radix tree, or in hybrid pools, which keep a state or a window besides KV.
    """
    return not (
        scheduler.disable_radix_cache
        or getattr(scheduler, "is_hybrid_swa", False)
        or getattr(scheduler, "is_hybrid_ssm", False)
    )


def available_tokens(tree_cache: Any) -> int:
    """Return how many KV slots are free or could be freed by eviction."""
    allocator = tree_cache.token_to_kv_pool_allocator
    return allocator.available_size() + RELEASE.evictable_tokens(tree_cache)


class StreamPins:
    """Locks the KV of prompt streams while there is room for it.

    When a request needs the room, pins are given up, and the streams' KV can be evicted. The first
    to go are streams whose requests come last, by their :class:`Stage`, and the newest of these: if
    there is not room for all, the streams that stay are still there when their requests come. While
    streams wait for tools, the oldest goes: most tools end soon, and a tool that has not ended is
    likely to run on.

    Args:
        on_give_way: called with the id of a stream whose pin is given up.
        stage: returns the stage of the stream with an id.

    ``gave_way`` counts the pins that were given up because room was needed.
    """

    def __init__(
        self,
        tree_cache: Any,
        on_give_way: Callable[[str], None],
        stage: Callable[[str], Stage],
    ) -> None:
        self._tree_cache = tree_cache
        self._on_give_way = on_give_way
        self._stage = stage
        # The first pinned stream comes first.
        self._pins: dict[str, Pin] = {}
        self.gave_way = 0

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, stream: object) -> bool:
        return stream in self._pins

    def is_complete(self, stream: str) -> bool:
        """Return whether the tree certainly has no more of a stream than is pinned."""
        pin = self._pins.get(stream)
        # Some trees do not show the children of a node.
        return pin is not None and not getattr(pin.node, "children", True)

    def replace(self, stream: str, new: Pin) -> None:
        """Pin a stream's longer prefix, then unlock the shorter one."""
        old = self._pins.get(stream)
        self._pins[stream] = new
        if old is not None:
            self.unlock(old)

    def release(self, stream: str) -> None:
        """Give up the pin of a stream that has ended."""
        if (pin := self._pins.pop(stream, None)) is not None:
            self.unlock(pin)

    def give_way(self, may: Callable[[str], bool] = lambda _: True) -> bool:
        """Give up one pin of the streams that may give way; return whether there was one."""
        pins = [stream for stream in self._pins if may(stream)]
        if not pins:
            return False
        stage = min(map(self._stage, pins))
        of_stage = [stream for stream in pins if self._stage(stream) == stage]
        stream = of_stage[0 if stage is Stage.TOOLS else -1]
        self.release(stream)
        self.gave_way += 1
        self._on_give_way(stream)
        logger.debug("Prompt stream %s gives way: its KV is evictable now", stream)
        return True

    def make_room(self, tokens: int) -> None:
        """Give up pins until ``tokens`` could be allocated, or none is left."""
        while available_tokens(self._tree_cache) < tokens and self.give_way():
            pass

    def forget(self) -> None:
        """Drop all pins without unlocking them, because the tree and its nodes were reset."""
        self._pins.clear()

    def unlock(self, pin: Pin) -> None:
        self._tree_cache.dec_lock_ref(pin.node, pin.unlock)
