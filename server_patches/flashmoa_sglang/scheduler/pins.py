"""``StreamPins``: locks on the KV of prompt streams in the radix tree."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from flashmoa_sglang.sglang.releases import RELEASE

logger = logging.getLogger(__name__)

_REMEMBERED_RELEASES = 4096


class Stage(IntEnum):
    """How soon the request of a prompt stream comes; the latest first.

    ``KNOWN``: the agent before has not begun to write. ``HELD``: nothing but the results of tools
    is missing. ``NEXT``: the agent before writes, or the request has come.
    """

    KNOWN = 0
    HELD = 1
    NEXT = 2


@dataclass(frozen=True, slots=True)
class Pin:
    """A lock on a node of the radix tree; ``unlock`` is SGLang's argument for unlocking it."""

    node: Any
    unlock: Any


def pin_published(scheduler: Any, req: Any) -> Pin:
    """Lock the nodes that hold a published request's KV, so that they are not evicted."""
    lock = scheduler.tree_cache.inc_lock_ref(req.last_node)
    return Pin(req.last_node, lock.to_dec_params())


def match_and_pin(tree_cache: Any, key: Any) -> tuple[Pin, int]:
    """Lock the nodes that hold a key or its beginning; return also how many tokens they hold."""
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

    When a request needs the room, pins are given up. The streams' KV is then ordinary cache that
    can be evicted. The streams give way first whose requests come last, by their :class:`Stage`,
    and of one stage the newest: if there is not room for all, those that stay are still there when
    their requests come. Of prompts that are held over tool calls the oldest gives way: most tools
    end soon, and one that has not is likely to run on.

    Args:
        on_give_way: called with the id of a stream whose pin is given up.
        stage: returns the stage of the stream with an id.

    Attributes:
        gave_way: how many pins were given up because room was needed.
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
        self._pins: OrderedDict[str, Pin] = OrderedDict()
        self._released: OrderedDict[str, None] = OrderedDict()
        self.gave_way = 0

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, stream: object) -> bool:
        return stream in self._pins

    def hold_all(self, stream: str) -> bool:
        """Return whether the tree has certainly no more of a stream than what is pinned of it."""
        pin = self._pins.get(stream)
        # Some trees do not show what they hold behind a node.
        return pin is not None and not getattr(pin.node, "children", True)

    def replace(self, stream: str, new: Pin) -> None:
        """Pin a stream's longer prefix, then unlock the shorter one."""
        old = self._pins.get(stream)
        if stream in self._released:
            self.unlock(new)
        else:
            self._pins[stream] = new
        if old is not None:
            self.unlock(old)

    def release(self, stream: str) -> None:
        """Give up the pin of a stream that has ended; increments that end later pin nothing."""
        self._released[stream] = None
        if len(self._released) > _REMEMBERED_RELEASES:
            self._released.popitem(last=False)
        old = self._pins.pop(stream, None)
        if old is not None:
            self.unlock(old)

    def give_way(self, may: Callable[[str], bool] | None = None) -> bool:
        """Give up one pin, and return whether there was one.

        Args: may: returns whether the stream with an id may give way; by default all may.
        """
        pins = [stream for stream in self._pins if may is None or may(stream)]
        if not pins:
            return False
        stage = min(map(self._stage, pins))
        of_stage = [stream for stream in pins if self._stage(stream) == stage]
        stream = of_stage[0 if stage is Stage.HELD else -1]
        self.unlock(self._pins.pop(stream))
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
        """Unlock nodes, whose pin is not held here or not any more."""
        self._tree_cache.dec_lock_ref(pin.node, pin.unlock)
