"""Finds boundaries: places in a text at which a tokenizer always splits, whatever text follows.

A kind of boundary is a pattern for the characters on both sides of it. Each kind is checked with
the served tokenizer at start: no entry of the vocabulary may span a boundary, and splitting sample
texts at one must not change their tokens. If no kind passes, streams are tokenised at their end.
"""

from __future__ import annotations

import logging
import random
import re
from typing import Any

logger = logging.getLogger(__name__)

# A lookbehind for one character on the left, and a lookahead for the characters on the right.
BOUNDARIES: dict[str, str] = {
    "word": r"(?<=[A-Za-z0-9])(?= [A-Za-z0-9])",
    "punctuation": r"(?<=[.,;:!?])(?= [A-Za-z])",
    "line": r"(?<=[A-Za-z0-9])(?=\n)",
}
RIGHT_CONTEXT = 2
_SAMPLES = 96
# Printable characters with which vocabularies spell white space (byte-level, sentencepiece).
_SPELLINGS = str.maketrans({"Ġ": " ", "Ċ": "\n", "▁": " "})


def find_boundaries(tokenizer: Any, encode: Any) -> list[str]:
    """Return the usable kinds of boundary; none if they cannot be determined, which is logged."""
    try:
        return _usable_boundaries(tokenizer, encode)
    except Exception as error:
        logger.warning(
            "Prompt streams of text are tokenised when they end, not earlier, because it could "
            "not be found out where this tokenizer splits text (%s: %s)",
            type(error).__name__,
            error,
        )
        return []


def vocabulary_of(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the vocabulary's entries by their text; some tokenizers have bytes."""
    return {
        token.decode(errors="replace") if isinstance(token, bytes) else token: index
        for token, index in tokenizer.get_vocab().items()
    }


def _usable_boundaries(tokenizer: Any, encode: Any) -> list[str]:
    """Return the kinds of boundary that hold for this tokenizer, in the order of ``BOUNDARIES``."""
    added_tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
    added = [str(token) for token in added_tokens]
    swallowing = [
        str(token)
        for token in added_tokens
        if getattr(token, "rstrip", False) or getattr(token, "lstrip", False)
    ]
    vocabulary = [token.translate(_SPELLINGS) for token in vocabulary_of(tokenizer)] + added
    samples = _sample_texts(vocabulary, added)
    usable: list[str] = []
    for name, pattern in BOUNDARIES.items():
        boundary = re.compile(pattern)
        # A token that swallows adjacent white space also swallows the right side of a boundary.
        swallowed = any(
            boundary.search(f"{token} a") or boundary.search(f"{token}\n") for token in swallowing
        )
        spanned = any(_has_inner_boundary(boundary, entry) for entry in vocabulary)
        if not swallowed and not spanned and _splits(boundary, samples, encode):
            usable.append(name)
    return usable


def _has_inner_boundary(boundary: re.Pattern[str], entry: str) -> bool:
    # With one more letter, a boundary is also found if its right context ends the entry.
    return any(0 < match.start() < len(entry) for match in boundary.finditer(entry + "a"))


def _sample_texts(vocabulary: list[str], added: list[str]) -> list[str]:
    """Make random texts of vocabulary entries and difficult pieces, the same at every start."""
    dice = random.Random(0)
    difficult = [" ", "  ", "\n", "\n\n", " \n ", "\t", "'s", "12", "3456", ". ", "é", "e\u0301"]
    difficult += ["中文，好", "🙂", *added]
    texts: list[str] = []
    for _ in range(_SAMPLES):
        pieces = dice.choices(vocabulary, k=6) + dice.choices(difficult, k=4) + [" and a b. C\n"]
        dice.shuffle(pieces)
        texts.append("".join(pieces))
    return texts


def _splits(boundary: re.Pattern[str], samples: list[str], encode: Any) -> bool:
    """Return whether the tokenizer splits the samples at every boundary, as far as it is tried."""
    for text in samples:
        for match in list(boundary.finditer(text))[:4]:
            at = match.start()
            anchor = text[at - 1]
            rest = encode(anchor + text[at:])[len(encode(anchor)) :]
            if encode(text[:at]) + rest != encode(text):
                return False
            # The text after the boundary's right context must not matter, either.
            near = text[: at + RIGHT_CONTEXT]
            if encode(near)[: len(encode(text[:at]))] != encode(text[:at]):
                return False
    return True
