"""Which data-parallel rank computes a request: the one that it names, or that of its siblings.

Ranks do not share KV. So streams that begin alike (of the agents of a team, or of the proposers of
a mixture) are computed by one rank, unless it has far more streams than another rank. A router that
knows what each rank has cached names the rank in a header, on every route; SGLang itself reads that
header of chats and completions only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from flashmoa_sglang.http.token_buffer import common_length

# Streams are siblings if at least this many characters, or tokens, at their beginnings are equal.
_SIBLING_LENGTH = 64
# Only this many characters or tokens are compared.
_COMPARED_LENGTH = 2048
# The siblings' rank gets the stream if it has fewer than this many streams more than any other.
_MAX_IMBALANCE = 16

Prompt = str | Sequence[int]
_HEADER = "x-data-parallel-rank"


def read_rank(http_request: Any, ranks: int) -> int | None:
    """Return the rank that an HTTP request names, or ``None``.

    Raises: ValueError if there is no such rank.
    """
    named = http_request.headers.get(_HEADER) if http_request is not None else None
    if named is None:
        return None
    if not (named.isascii() and named.isdecimal() and int(named) < ranks):
        raise ValueError(
            f"{_HEADER} must be a whole number below {ranks}, the number of data-parallel ranks, "
            f"not {named!r}; leave it out to let the engine choose."
        )
    return int(named)


def choose_rank(ranks: int, streams: Iterable[tuple[int, Prompt]], beginning: Prompt) -> int:
    """Choose the rank for a stream with this beginning.

    Args:
        ranks: number of ranks.
        streams: rank and prompt of each open stream; token ids are an ``array("q")``.
    """
    if not isinstance(beginning, str):
        beginning = array("q", beginning[:_COMPARED_LENGTH])
    loads = [0] * ranks
    common = [0] * ranks
    for rank, prompt in streams:
        loads[rank] += 1
        common[rank] = max(common[rank], _common_length(prompt, beginning))
    best = max(range(ranks), key=lambda rank: (common[rank], -loads[rank]))
    if common[best] >= _SIBLING_LENGTH and loads[best] - min(loads) < _MAX_IMBALANCE:
        return best
    return loads.index(min(loads))


def _common_length(first: Prompt, second: Prompt) -> int:
    """Return the length of the common prefix; 0 if it is too short to make the two siblings."""
    if isinstance(first, str) != isinstance(second, str):
        return 0
    length = common_length(first[:_COMPARED_LENGTH], second[:_COMPARED_LENGTH])
    return length if length >= _SIBLING_LENGTH else 0
