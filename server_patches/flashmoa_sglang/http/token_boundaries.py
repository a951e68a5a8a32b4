"""Finds boundaries: places in a text at which a tokenizer always splits, whatever text follows.

A kind of boundary is a pattern for the characters on both sides of it. Each kind is checked with
the served tokenizer at start: no entry of the vocabulary may span one, unless the tokenizer splits
the text there before it looks for entries, or the places are known at which an entry could do so;
and splitting sample texts at one must not change their tokens.
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
    # Composition turns the others into other characters.
    and unicodedata.normalize("NFC", character) == character
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
# The kinds whose characters no tokenizer changes before it looks for entries, but for their case.
_LATIN = ("latin word", "punctuation", "latin line")
RIGHT_CONTEXT = 2
# How many characters at the end of a text are searched first.
_LOOK = 64
_SAMPLES = 96
# Scripts, white space, marks, and what tokenizers are known to treat specially.
_DIFFICULT = (
    " ", "  ", "\n", "\n\n", " \n ", "\t", "\r\n", "'s", "'LL", "12", "3456", "7", ". ", "_", "▁",
    "é", "e\u0301", "\u0301", "\u200b", "\u00a0", "\u3000", "中文，好", "。", "日本語で", "한국어",
    "--", "русский", "عربي، ", "עברית", "हिन्दी। ", "ไทย", "🙂", "👩‍👩‍👧", '{"a":1,', "</p>", "½",
    "²", "٣",
    "Ｕ．Ｓ", "（笑）", "U.S.", "ID19", "\u212a.", "녙。",
)  # fmt: skip


# Printable characters with which vocabularies spell white space (byte-level, sentencepiece).
_SPELLINGS = str.maketrans({"Ġ": " ", "Ċ": "\n", "▁": " "})


class Boundaries:
    """The boundaries of a tokenizer.

    Args:
        kinds: the kinds that hold for it, and for each the beginnings of entries of its vocabulary:
            where the text before a boundary ends with one of them, the entry may span the boundary.

    Attributes:
        kinds: the names of the kinds.
    """

    def __init__(self, kinds: Mapping[str, Iterable[str]]) -> None:
        self.kinds = list(kinds)
        pattern = "|".join(BOUNDARIES[name] for name in self.kinds)
        self._pattern = re.compile(pattern or r"(?!)")
        self._beginnings: dict[int, set[str]] = {}
        for beginning in chain(*kinds.values()):
            # Some tokenizers put a space before a text and before what follows a special token. The
            # text may also be encoded from the last character before the boundary on.
            for each in {beginning, beginning.removeprefix(" ")} - {""}:
                self._beginnings.setdefault(len(each), set()).add(each)

    def last(self, text: str, start: int) -> int:
        """Return the last boundary in ``text`` after ``start``, or ``start`` if there is none."""
        low, size = len(text), _LOOK
        while low > start:
            # A long text has many boundaries, of which the last is wanted.
            high, low = low, max(start, low - size)
            found = [
                match.start() for match in self._pattern.finditer(text, low, high + RIGHT_CONTEXT)
            ]
            for place in reversed(found):
                if start < place <= high and not self._is_spanned(text, place):
                    return place
            size *= 2
        return start

    def holds_at(self, text: str, place: int) -> bool:
        return self._pattern.match(text, place) is not None and not self._is_spanned(text, place)

    def _is_spanned(self, text: str, place: int) -> bool:
        return any(
            text[max(0, place - length) : place] in beginnings
            for length, beginnings in self._beginnings.items()
        )


def find_boundaries(tokenizer: Any, encode: Any) -> Boundaries:
    """Return a tokenizer's boundaries; none if they cannot be determined, which is logged."""
    try:
        return _usable_boundaries(tokenizer, encode)
    except Exception as error:
        logger.warning(
            "Tokens of prompt streams of text are certain when they end, not earlier, because it "
            "could not be found out where this tokenizer splits text (%s: %s)",
            type(error).__name__,
            error,
        )
        return Boundaries({})


def vocabulary_of(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the vocabulary's entries by their text; some tokenizers have bytes."""
    return {
        token.decode(errors="replace") if isinstance(token, bytes) else token: index
        for token, index in tokenizer.get_vocab().items()
    }


def _usable_boundaries(tokenizer: Any, encode: Any) -> Boundaries:
    vocabulary = vocabulary_of(tokenizer)
    # Large vocabularies of sentencepiece have the characters of that alphabet, too.
    is_byte_level = "▁" not in vocabulary and _byte_level_alphabet().keys() <= vocabulary.keys()
    added_tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
    added = [str(token) for token in added_tokens]
    entries = [*_texts_of(vocabulary, is_byte_level)]
    samples = _sample_texts([*entries, *added], added)
    rules = _Rules(tokenizer, encode, samples, is_byte_level)
    # Most entries are a word, which no boundary is in.
    spanning = [entry for entry in {*entries} - {*added} if not entry.removeprefix(" ").isalpha()]
    usable: dict[str, set[str]] = {}
    for name, text in BOUNDARIES.items():
        pattern = re.compile(text)
        beginnings = _beginnings(pattern, spanning)
        if _is_swallowed(pattern, added_tokens) or not rules.allow(name, pattern, bool(beginnings)):
            continue
        kind = {name: beginnings | _beginnings(pattern, added)}
        if _splits(Boundaries(kind), samples, encode):
            usable.update(kind)
    return Boundaries(usable)


class _Rules:
    """What a tokenizer does with a text before and while it looks for entries of its vocabulary."""

    def __init__(
        self, tokenizer: Any, encode: Any, samples: list[str], is_byte_level: bool
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        model = type(getattr(backend, "model", None)).__name__

        def are_same(*pairs: str) -> bool:
            return any(encode(one) == encode(other) for one, other in pairs)

        # The likeliest way to divide a text into entries may depend on all of it: of equally likely
        # ones, the rounding of sums decides.
        self._is_unigram = model == "Unigram"
        # Where a boundary is may change, if characters are replaced by others of another kind.
        self._mixes = are_same("Aa", "ａa", "（(", "①1", "éE")
        # An entry can be compared with a text if neither has other characters in its place. Those
        # of bytes may have a part of a character.
        composes = are_same("\u212aK", "\u212bÅ")
        self._compares = model == "BPE" and not (is_byte_level or composes or self._mixes)
        self._presplit = [*_presplit(backend, samples)]

    def allow(self, name: str, pattern: re.Pattern[str], is_spanned: bool) -> bool:
        """Return whether a kind can hold, given whether an entry of the vocabulary spans it."""
        if self._presplit and all(
            match.start() in edges
            for text, edges in self._presplit
            for match in pattern.finditer(text, 1)
        ):
            return True
        if self._is_unigram or (self._mixes and name not in _LATIN):
            return False
        return self._compares or not is_spanned


def _presplit(backend: Any, samples: list[str]) -> Iterator[tuple[str, set[int]]]:
    """Yield each sample as the tokenizer normalises it, and the places at which it then splits."""
    if getattr(backend, "pre_tokenizer", None) is None:
        return
    for sample in samples:
        text = sample
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(sample)
        pieces = backend.pre_tokenizer.pre_tokenize_str(text)
        yield text, {place for _, places in pieces for place in places}


def _beginnings(boundary: re.Pattern[str], entries: Iterable[str]) -> set[str]:
    """Return what entries have before the boundaries that they span."""
    found: set[str] = set()
    for entry in entries:
        # The right side of a boundary may begin with the last character of the entry, a space.
        for following in "a-" if entry.endswith(" ") else ("",):
            places = (match.start() for match in boundary.finditer(entry + following, 1))
            found.update(entry[:place] for place in places if place < len(entry))
    return found


def _texts_of(vocabulary: Mapping[str, int], is_byte_level: bool) -> Iterator[str]:
    """Yield the text of each entry.

    A letter stands for what an entry of bytes has of a character at its beginning or end.
    """
    byte_of = _byte_level_alphabet()
    for entry in vocabulary:
        text = entry
        if not is_byte_level:
            # Trained tokenizers without the whole alphabet spell white space like byte-level ones.
            text = entry.translate(_SPELLINGS)
        elif all(character in byte_of for character in entry):
            text = bytes(byte_of[character] for character in entry).decode(errors="replace")
        yield text.replace("\ufffd", "文")


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte for each printable character with which byte-level vocabularies spell it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(0x100 + number): byte for number, byte in enumerate(others)},
    }


def _is_swallowed(boundary: re.Pattern[str], added_tokens: Iterable[Any]) -> bool:
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
