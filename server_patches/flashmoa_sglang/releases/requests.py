"""``RequestAccess``: how releases keep a request's tokens and its part of the radix tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from array import array
    from collections.abc import Hashable

    import numpy as np
    from numpy.typing import NDArray


class RequestAccess(ABC):
    """The part of a ``Release`` that reads and changes requests in a scheduler."""

    def needs_host_load(self, req: Any) -> bool:
        """Return whether some of the request's KV must be loaded back from host memory."""
        return req.needs_host_load_back()

    def namespace(self, req: Any) -> Hashable:
        """Return the namespace of the request's KV: extra key (with a LoRA adapter), cache salt."""
        return (req.extra_key, req.cache_salt)

    def cached_tokens(self, req: Any) -> int:
        """Return the length of the prefix whose KV the request need not compute."""
        return len(req.prefix_indices)

    def longest_prefix(self, req: Any) -> int:
        """Return how long the cached prefix may be: at least one token is always computed."""
        return req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))

    @abstractmethod
    def computed_until(self, req: Any) -> int:
        """Return the position in the request's tokens up to which its batch computes it."""

    def tokens(self, req: Any, start: int, end: int | None) -> NDArray[np.int64]:
        """Return a copy of the request's tokens from ``start`` to ``end``."""
        import numpy

        return numpy.frombuffer(req.full_untruncated_fill_ids[start:end], dtype=numpy.int64)

    def grow_prefix(self, req: Any, count: int) -> None:
        """Count ``count`` more tokens as cached; their slots are set once the batch is built."""
        import torch

        prefix = req.prefix_indices
        self._set_prefix(req, torch.cat([prefix, prefix.new_zeros(count)]))

    def shrink_prefix(self, req: Any, length: int) -> None:
        """Count only the first ``length`` tokens as cached."""
        self._set_prefix(req, req.prefix_indices[:length])

    def _set_prefix(self, req: Any, indices: Any) -> None:
        req.prefix_indices = indices

    def radix_key(self, req: Any, end: int) -> Any:
        """Return the key of the request's first ``end`` tokens in the radix tree."""
        return self.key_of(req.full_untruncated_fill_ids[:end], req)

    def key_of(self, tokens: array[int], req: Any) -> Any:
        """Return the key of tokens in the radix tree, in the namespace of a request."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)

    def token_ids(self, tokens: array[int]) -> Any:
        """Return tokens in the form of a request's ``input_ids``."""
        return tokens

    def uncached_tokens(self, tree_cache: Any, req: Any) -> int:
        """Return how many tokens of a waiting request are not in the radix tree."""
        total = len(req.origin_input_ids) + len(req.output_ids)
        return total - self.matched_tokens(tree_cache, req)

    def evictable_tokens(self, tree_cache: Any) -> int:
        """Return how many tokens of the radix tree could be evicted."""
        return tree_cache.evictable_size()

    def protected_tokens(self, tree_cache: Any) -> int:
        """Return how many tokens of the radix tree are locked."""
        return tree_cache.protected_size()

    def matched_slots(self, tree_cache: Any, prefix_match: Any) -> Any:
        """Return the KV slots of a match with the radix tree, as a tensor."""
        return prefix_match.device_indices

    def matched_length(self, prefix_match: Any) -> int:
        """Return the number of tokens of a match with the radix tree."""
        return len(prefix_match.device_indices)

    def may_go_on(self, node: Any) -> bool:
        """Return whether the radix tree may hold more behind a node; some trees do not show it."""
        return bool(getattr(node, "children", True))

    @abstractmethod
    def matched_tokens(self, tree_cache: Any, req: Any) -> int:
        """Match a waiting request with the radix tree. Return the length of the cached prefix."""
