"""Finds boundaries: places in a text at which a tokenizer always splits, whatever text follows.

A kind of boundary is a pattern for the characters on both sides of it. Each kind is checked with
the served tokenizer at start: entries of the vocabulary that span a boundary exclude the places at
which they could do so, and splitting sample texts at one must not change their tokens.
"""

from __future__ import annotations

import logging
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

logger = logging.getLogger(__name__)

# The planes after these have ideographs.
_CHARACTERS = [*map(chr, range(0x80, 0x20000))]
# What Python takes for a digit or a letter, as "²", and tokenizers for a number.
_FOREIGN_NUMBERS = "".join(
    character for character in _CHARACTERS if character.isalnum() and not character.isalpha()
)
# Letters of every script and digits, but not marks: some tokenizers take these for letters, and
# others for punctuation.
_ALPHANUMERIC = rf"[^\W_{_FOREIGN_NUMBERS}]"
_LETTER = rf"[^\W_0-9{_FOREIGN_NUMBERS}]"
# "▁" is a space to sentencepiece.
_NOT_SPACE = r"[^\s▁]"
# Apostrophes are missing, because some tokenizers attach contractions to the word.
_PUNCTUATION = re.escape('"#$%&()*+,-./:;<=>?@[\\]^`{|}~!')
_FOREIGN_PUNCTUATION = "".join(
    re.escape(character)
    for character in _CHARACTERS
    if unicodedata.category(character) in ("Pd", "Pe", "Pf", "Pi", "Po", "Ps")
    and character not in "‘’‛＇"
)
# A lookbehind for one character on the left, and a lookahead for the characters on the right. A
# narrow kind is there for tokenizers for which the wide one beside it does not hold.
BOUNDARIES: dict[str, str] = {
    "word": rf"(?<={_NOT_SPACE})(?= {_ALPHANUMERIC})",
    "latin word": r"(?<=[A-Za-z0-9])(?= [A-Za-z0-9])",
    "punctuation": r"(?<=[.,;:!?])(?= [A-Za-z])",
    "symbol": rf"(?<={_NOT_SPACE})(?= [{_PUNCTUATION}])",
    "line": rf"(?<={_ALPHANUMERIC})(?=\n)",
    "latin line": r"(?<=[A-Za-z0-9])(?=\n)",
    "next line": rf"(?<=\n)(?={_ALPHANUMERIC})",
    "end of word": rf"(?<={_ALPHANUMERIC})(?=[{_PUNCTUATION}])",
    "end of foreign word": rf"(?<={_ALPHANUMERIC})(?=[{_FOREIGN_PUNCTUATION}])",
    "number after a letter": rf"(?<={_LETTER})(?=[0-9])",
    "letter after a number": rf"(?<=[0-9])(?={_LETTER})",
    "number after a symbol": rf"(?<=[{_PUNCTUATION}])(?=[0-9])",
}
RIGHT_CONTEXT = 2
_SAMPLES = 96
# Scripts, white space, marks, and what tokenizers are known to treat specially.
_DIFFICULT = (
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        " \n ",
        "\t",
        "\r\n",
        "'s",
        "'LL",
        "12",
        "3456",
        "7",
        ". ",
        "_",
        "▁",
    ),
    *(
        "é",
        "e\u0301",
        "\u0301",
        "\u200b",
        "\u00a0",
        "\u3000",
        "中文，好",
        "。",
        "日本語で",
        "한국어",
    ),
    *(
        "русский",
        "عربي، ",
        "עברית",
        "हिन्दी। ",
        "ไทย",
        "🙂",
        "👩‍👩‍👧",
        '{"a":1,',
        "</p>",
        "--",
        "½",
        "²",
        "٣",
    ),
)


class Boundaries:
    """The boundaries of a tokenizer.

    Args:
        kinds: the kinds that hold for it.
        spanning: the entries of its vocabulary that span a boundary of these kinds.

    Attributes:
        kinds: the same, in the order of ``BOUNDARIES``.
    """

    def __init__(self, kinds: Iterable[str] = (), spanning: Iterable[str] = ()) -> None:
        self.kinds = list(kinds)
        pattern = "|".join(BOUNDARIES[name] for name in self.kinds)
        self._pattern = re.compile(pattern or r"(?!)")
        # A boundary holds unless the text before it ends like the left part of a spanning entry.
        self._lefts: dict[int, set[str]] = {}
        for entry in spanning:
            for place in _spanned_places(self._pattern, entry):
                self._lefts.setdefault(place, set()).add(entry[:place])

    def last(self, text: str, start: int) -> int:
        """Return the last boundary in ``text`` after ``start``, or ``start`` if there is none."""
        found = [match.start() for match in self._pattern.finditer(text, max(start, 1))]
        return next(
            (place for place in reversed(found) if not self._is_spanned(text, place)), start
        )

    def holds_at(self, text: str, position: int) -> bool:
        return self._pattern.match(text, position) is not None and not self._is_spanned(
            text, position
        )

    def _is_spanned(self, text: str, position: int) -> bool:
        # The text may be encoded from the last character before the boundary on, and some
        # tokenizers put a space before the start of a text.
        return f" {text[position - 1]}" in self._lefts.get(2, ()) or any(
            text[max(0, position - length) : position] in lefts
            for length, lefts in self._lefts.items()
        )


def find_boundaries(tokenizer: Any, encode: Any) -> Boundaries:
    """Return a tokenizer's boundaries; none if they cannot be determined, which is logged."""
    try:
        return _usable_boundaries(tokenizer, encode)
    except Exception as error:
        logger.warning(
            "Prompt streams of text are tokenised when they end, not earlier, because it could "
            "not be found out where this tokenizer splits text (%s: %s)",
            type(error).__name__,
            error,
        )
        return Boundaries()


def vocabulary_of(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the vocabulary's entries by their text; some tokenizers have bytes."""
    return {
        token.decode(errors="replace") if isinstance(token, bytes) else token: index
        for token, index in tokenizer.get_vocab().items()
    }


def _usable_boundaries(tokenizer: Any, encode: Any) -> Boundaries:
    added_tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
    added = [str(token) for token in added_tokens]
    vocabulary = [*_texts_of(vocabulary_of(tokenizer)), *added]
    any_kind = re.compile("|".join(BOUNDARIES.values()))
    spanning = [entry for entry in vocabulary if _spanned_places(any_kind, entry)]
    samples = _sample_texts(vocabulary, added)
    usable: list[str] = []
    for name, pattern in BOUNDARIES.items():
        kind = Boundaries((name,), spanning)
        if not _is_swallowed(re.compile(pattern), added_tokens) and _splits(kind, samples, encode):
            usable.append(name)
    return Boundaries(usable, spanning)


def _spanned_places(boundary: re.Pattern[str], entry: str) -> set[int]:
    """Return the boundaries inside an entry of a vocabulary."""
    if boundary.search(f"{entry}a", 1) is None and not entry.endswith(" "):
        return set()
    # The right side of a boundary may begin with the last character of the entry, a space.
    found = chain(*(boundary.finditer(entry + following, 1) for following in "a-"))
    return {match.start() for match in found if match.start() < len(entry)}


def _texts_of(vocabulary: Mapping[str, int]) -> Iterator[str]:
    """Yield the text of each entry; of byte-level ones, whole characters only."""
    byte_of = _byte_level_alphabet()
    is_byte_level = all(character in vocabulary for character in byte_of)
    for entry in vocabulary:
        if is_byte_level and all(character in byte_of for character in entry):
            yield bytes(byte_of[character] for character in entry).decode(errors="ignore")
        elif is_byte_level:
            yield entry
        else:
            # Trained tokenizers without the whole alphabet spell white space like byte-level ones.
            yield entry.translate(_SPELLINGS)


_SPELLINGS = str.maketrans({"Ġ": " ", "Ċ": "\n", "▁": " "})


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte for each printable character with which byte-level vocabularies spell it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(0x100 + number): byte for number, byte in enumerate(others)},
    }


def _is_swallowed(boundary: re.Pattern[str], added_tokens: Iterable[Any]) -> bool:
    """Return whether an added token swallows white space on one side of a boundary."""
    return any(
        (
            getattr(token, "rstrip", False)
            and any(map(boundary.search, (f"{token} a", f"{token}\n")))
        )
        or (getattr(token, "lstrip", False) and boundary.search(f"a {token}"))
        for token in added_tokens
    )


def _sample_texts(vocabulary: list[str], added: list[str]) -> list[str]:
    """Make random texts of vocabulary entries and difficult pieces, the same at every start."""
    dice = random.Random(0)
    difficult = [*_DIFFICULT, *dice.sample(added, min(len(added), len(_DIFFICULT)))]
    texts: list[str] = []
    for _ in range(_SAMPLES):
        pieces = dice.choices(vocabulary, k=6) + dice.choices(difficult, k=8) + [" and a b. C\n"]
        dice.shuffle(pieces)
        texts.append("".join(pieces))
    return texts


def _splits(kind: Boundaries, samples: list[str], encode: Any) -> bool:
    """Return whether the tokenizer splits the samples at every boundary, as far as it is tried."""
    for text in samples:
        places = (place for place in range(1, len(text)) if kind.holds_at(text, place))
        for at in islice(places, 4):
            before, anchor = encode(text[:at]), text[at - 1]
            rest = encode(anchor + text[at:])[len(encode(anchor)) :]
            if before + rest != encode(text):
                return False
            # The text after the boundary's right context must not matter, either.
            if encode(text[: at + RIGHT_CONTEXT])[: len(before)] != before:
                return False
    return True
