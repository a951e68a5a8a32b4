"""Represent prompts as hashes of their blocks (`Blocks`); pure.

Two prompts share their first ``n`` blocks exactly if their first ``n`` hashes are equal, so looking
up hashes shows how much of a prompt an engine has cached (MoE-Prefill §7.2).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

BLOCK_TOKENS = 16
# The usual length of a token of English text, which is used if no tokenizer is available.
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Blocks:
    """A prompt, cut into blocks of equal size.

    Attributes:
        hashes: one 64-bit hash for each whole block, over that block and all blocks before it.
        length: number of tokens in the whole prompt.
        size: number of tokens in a block.
        is_list: whether it is a list of prompts, which are one request and begin alike. The hashes
            are of the list's beginning only, and ``length`` counts what the prompts share once.
    """

    hashes: tuple[int, ...]
    length: int
    size: int = BLOCK_TOKENS
    is_list: bool = False

    def cached_tokens(self, matched: int) -> int:
        """Return how many tokens need not be computed if the first ``matched`` blocks are cached.

        This is less than ``length``: engines compute a prompt's last token again, because they
        sample from its output.
        """
        return max(0, min(matched * self.size, self.length - 1))


def token_blocks(tokens: Sequence[int], size: int = BLOCK_TOKENS, salt: str = "") -> Blocks:
    """Return the blocks of a prompt of token ids below 2**32, ``size`` tokens each."""
    encoded = array("I", tokens)
    return _blocks(encoded.tobytes(), encoded.itemsize, len(tokens), size, salt)


def text_blocks(text: str, size: int = BLOCK_TOKENS, salt: str = "") -> Blocks:
    """Return the blocks of a text whose tokens are not known, about ``size`` tokens each."""
    encoded = text.encode("utf-32-le", errors="surrogatepass")
    return _blocks(encoded, 4 * CHARACTERS_PER_TOKEN, token_count(len(text)), size, salt)


def token_count(characters: int) -> int:
    """Return about how many tokens a text of this length has."""
    return -(-characters // CHARACTERS_PER_TOKEN)


def first_hash(salt: str) -> int:
    """Return the hash that precedes the first block of prompts with this cache salt."""
    return next_hash(0, salt.encode(errors="surrogatepass")) if salt else 0


def next_hash(previous: int, content: bytes | memoryview) -> int:
    """Return the hash of a block, given that of the block before it."""
    digest = blake2b(previous.to_bytes(8, "little"), digest_size=8)
    digest.update(content)
    return int.from_bytes(digest.digest(), "little")


def _blocks(encoded: bytes, width: int, length: int, size: int, salt: str) -> Blocks:
    """Hash a prompt block by block. ``width``: number of bytes per token in ``encoded``."""
    step = width * size
    view = memoryview(encoded)
    hashes: list[int] = []
    last = first_hash(salt)
    for end in range(step, len(encoded) + 1, step):
        last = next_hash(last, view[end - step : end])
        hashes.append(last)
    return Blocks(tuple(hashes), length, size)
