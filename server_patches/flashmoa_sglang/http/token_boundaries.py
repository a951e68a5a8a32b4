"""Where a tokenizer splits whatever comes later: found out once, at start.

A boundary must be visible in full (both sides), and every kind of boundary is checked against the
served tokenizer: no vocabulary entry may span one, and splitting sample texts at one must
change nothing. A tokenizer for which no kind holds still works: its streams are tokenised
at their end.
"""

from __future__ import annotations

import logging
import random
import re
from typing import Any

logger = logging.getLogger(__name__)

# Left context is one character (lookbehind), right context is a lookahead.
BOUNDARIES: dict[str, str] = {
    "word": r"(?<=[A-Za-z0-9])(?= [A-Za-z0-9])",
    "punctuation": r"(?<=[.,;:!?])(?= [A-Za-z])",
    "line": r"(?<=[A-Za-z0-9])(?=\n)",
}
_RIGHT_CONTEXT = 2
_SAMPLES = 96
# Where a vocabulary spells white space with a printable stand-in (byte-level, sentencepiece).
_SPELLINGS = str.maketrans({"Ġ": " ", "Ċ": "\n", "▁": " "})


def find_boundaries(tokenizer: Any, encode: Any) -> list[str]:
    """Find the boundaries; without any, text is held back until its end: slow, and right."""
    try:
        return _usable_boundaries(tokenizer, encode)
    except Exception as error:
        logger.warning(
            "Prompt streams of text are tokenised when they end, and no sooner: where this "
            "tokenizer splits text could not be found out (%s: %s)",
            type(error).__name__,
            error,
        )
        return []


def vocabulary_of(tokenizer: Any) -> dict[str, int]:
    """Return the vocabulary as text; some tokenizers spell it in bytes."""
    return {
        token.decode(errors="replace") if isinstance(token, bytes) else token: index
        for token, index in tokenizer.get_vocab().items()
    }


def _usable_boundaries(tokenizer: Any, encode: Any) -> list[str]:
    """Return the kinds of boundary that hold for this tokenizer, in the order of ``BOUNDARIES``."""
    added = [str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()]
    swallowing = [
        str(token)
        for token in getattr(tokenizer, "added_tokens_decoder", {}).values()
        if getattr(token, "rstrip", False) or getattr(token, "lstrip", False)
    ]
    vocabulary = [token.translate(_SPELLINGS) for token in vocabulary_of(tokenizer)] + added
    samples = _sample_texts(vocabulary, added)
    usable: list[str] = []
    for name, pattern in BOUNDARIES.items():
        boundary = re.compile(pattern)
        # A token that takes the white space beside it takes the boundary's right side with it.
        swallowed = any(
            boundary.search(f"{token} a") or boundary.search(f"{token}\n") for token in swallowing
        )
        spanned = any(_has_inner_boundary(boundary, entry) for entry in vocabulary)
        if not swallowed and not spanned and _splits(boundary, samples, encode):
            usable.append(name)
    return usable


def _has_inner_boundary(boundary: re.Pattern[str], entry: str) -> bool:
    # One more letter on the right, so that a boundary whose right context ends the entry counts.
    return any(0 < match.start() < len(entry) for match in boundary.finditer(entry + "a"))


def _sample_texts(vocabulary: list[str], added: list[str]) -> list[str]:
    """Make random texts of vocabulary entries and difficult pieces, the same at every start."""
    dice = random.Random(0)
    trouble = [
        " ",
        "  ",
        "\n",
        "\n\n",
        " \n ",
        "\t",
        "'s",
        "12",
        "3456",
        ". ",
        "é",
        "e\u0301",
        "中文，好",
        "🙂",
    ]
    trouble += added
    texts: list[str] = []
    for _ in range(_SAMPLES):
        pieces = dice.choices(vocabulary, k=6) + dice.choices(trouble, k=4) + [" and a b. C\n"]
        dice.shuffle(pieces)
        texts.append("".join(pieces))
    return texts


def _splits(boundary: re.Pattern[str], samples: list[str], encode: Any) -> bool:
    for text in samples:
        for match in list(boundary.finditer(text))[:4]:
            at = match.start()
            anchor = text[at - 1]
            rest = encode(anchor + text[at:])[len(encode(anchor)) :]
            if encode(text[:at]) + rest != encode(text):
                return False
            # What follows the boundary's own context must not matter either.
            near = text[: at + _RIGHT_CONTEXT]
            if encode(near)[: len(encode(text[:at]))] != encode(text[:at]):
                return False
    return True
