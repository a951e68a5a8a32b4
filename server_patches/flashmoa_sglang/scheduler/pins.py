"""Locks on the KV of prompt streams."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

from flashmoa_sglang import releases

logger = logging.getLogger(__name__)

_REMEMBERED_RELEASES = 4096


class StreamPins:
    """Locks on the KV of prompt streams, the least recently extended first.

    A pin is a convenience, never a claim: it is given up as soon as anybody else needs the
    room, and the stream's KV is then ordinary evictable cache.
    """

    def __init__(self, tree_cache: Any) -> None:
        self._tree_cache = tree_cache
        self._pins: OrderedDict[str, releases.Pin] = OrderedDict()
        self._released: OrderedDict[str, None] = OrderedDict()
        self.gave_way = 0

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def streams(self) -> set[str]:
        return set(self._pins)

    def __contains__(self, stream: object) -> bool:
        return stream in self._pins

    def is_released(self, stream: str) -> bool:
        """Whether a stream is over; increments of it may still be on their way."""
        return stream in self._released

    def replace(self, stream: str, new: releases.Pin) -> None:
        """Pin a stream's longer prefix, then give up the shorter one."""
        old = self._pins.pop(stream, None)
        if stream in self._released:
            releases.unpin(self._tree_cache, new)
        else:
            self._pins[stream] = new
        if old is not None:
            releases.unpin(self._tree_cache, old)

    def release(self, stream: str) -> None:
        """The stream is over; later increments of it, already on their way, pin nothing."""
        self._released[stream] = None
        if len(self._released) > _REMEMBERED_RELEASES:
            self._released.popitem(last=False)
        old = self._pins.pop(stream, None)
        if old is not None:
            releases.unpin(self._tree_cache, old)

    def give_way(self) -> bool:
        """Give up the pin that was extended least recently; ``False`` if there is none."""
        if not self._pins:
            return False
        stream, old = self._pins.popitem(last=False)
        releases.unpin(self._tree_cache, old)
        self.gave_way += 1
        logger.debug("Prompt stream %s gives way: its KV is evictable now", stream)
        return True

    def make_room(self, tokens: int) -> None:
        """Give up pins until ``tokens`` could be allocated, or none is left."""
        while releases.free_tokens(self._tree_cache) < tokens and self.give_way():
            pass

    def forget(self) -> None:
        """The tree was reset, and the locked nodes with it."""
        self._pins.clear()
