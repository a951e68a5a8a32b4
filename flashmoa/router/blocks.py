"""A prompt as a chain of block hashes; pure.

Two prompts share their first ``n`` blocks exactly if their first ``n`` hashes are equal, so that
what an engine has of a prompt is found by looking hashes up (MoE-Prefill §7.2).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

BLOCK_TOKENS = 16
# Where there is no tokenizer: what a token of English text has, about.
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Blocks:
    """A prompt's whole blocks.

    Attributes:
        hashes: of each whole block and all before it; 64 bits each.
        length: of the whole prompt, in tokens.
        size: of a block, in tokens.
    """

    hashes: tuple[int, ...]
    length: int
    size: int = BLOCK_TOKENS

    def tokens(self, matched: int) -> int:
        """How many tokens need no computing if ``matched`` blocks are cached.

        Never all of them: engines compute a prompt's last token again, to sample after it.
        """
        return max(0, min(matched * self.size, self.length - 1))


def first_hash(salt: str = "") -> int:
    """What the chain of prompts under this cache salt begins with."""
    return _hash(0, salt.encode()) if salt else 0


def next_hash(before: int, tokens: Sequence[int]) -> int:
    """The hash of a block and all before it, from theirs. ``tokens``: ids below 2**32."""
    return _hash(before, array("I", tokens).tobytes())


def token_blocks(tokens: Sequence[int], size: int = BLOCK_TOKENS, salt: str = "") -> Blocks:
    """A tokenised prompt's blocks of ``size`` tokens."""
    return _blocks(array("I", tokens).tobytes(), array("I").itemsize, len(tokens), size, salt)


def text_blocks(text: str, size: int = BLOCK_TOKENS, salt: str = "") -> Blocks:
    """A text's blocks where its tokens are not known: as long as ``size`` tokens usually are."""
    encoded = text.encode("utf-32-le", errors="surrogatepass")
    length = -(-len(text) // CHARACTERS_PER_TOKEN)
    return _blocks(encoded, 4 * CHARACTERS_PER_TOKEN, length, size, salt)


def _blocks(encoded: bytes, width: int, length: int, size: int, salt: str) -> Blocks:
    """``width``: of a token, in bytes."""
    if size < 1:
        raise ValueError(f"a block has at least one token, not {size}")
    step = width * size
    view = memoryview(encoded)
    hashes: list[int] = []
    last = first_hash(salt)
    for end in range(step, len(encoded) + 1, step):
        last = _hash(last, view[end - step : end])
        hashes.append(last)
    return Blocks(tuple(hashes), length, size)


def _hash(before: int, content: bytes | memoryview) -> int:
    digest = blake2b(before.to_bytes(8, "little"), digest_size=8)
    digest.update(content)
    return int.from_bytes(digest.digest(), "little")
