"""Which data-parallel rank computes a new prompt stream: a pure decision.

KV is not shared between ranks, so streams that begin alike (the agents of a team, the proposers of
a mixture) belong to one rank, unless it has far more streams than another.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

# Characters or tokens in common that make two streams siblings.
_WORTH = 64
# As many of them are compared at most.
_MOST = 2048
# How many more streams than the least loaded rank the siblings' rank may have.
_UNEVEN = 16

Prompt = str | Sequence[int]


def choose_rank(ranks: int, streams: Iterable[tuple[int, Prompt]], beginning: Prompt) -> int:
    """Choose the rank for a stream with this beginning.

    Args:
        ranks: how many there are.
        streams: the rank and the prompt of each open stream; token ids as an ``array("q")``.
    """
    if not isinstance(beginning, str):
        beginning = array("q", beginning[:_MOST])
    loads = [0] * ranks
    shared = [0] * ranks
    for rank, prompt in streams:
        loads[rank] += 1
        shared[rank] = max(shared[rank], _common(prompt, beginning))
    best = max(range(ranks), key=lambda rank: (shared[rank], -loads[rank]))
    if shared[best] >= _WORTH and loads[best] - min(loads) < _UNEVEN:
        return best
    return loads.index(min(loads))


def _common(first: Prompt, second: Prompt) -> int:
    """Return the length of the common prefix, up to ``_MOST``; 0 if it is below ``_WORTH``."""
    if isinstance(first, str) != isinstance(second, str) or not _same(first, second, _WORTH):
        return 0
    low, high = _WORTH, min(len(first), len(second), _MOST)
    while low < high:
        middle = (low + high + 1) // 2
        if _same(first, second, middle):
            low = middle
        else:
            high = middle - 1
    return low


def _same(first: Prompt, second: Prompt, length: int) -> bool:
    if min(len(first), len(second)) < length:
        return False
    return first[:length] == second[:length]
