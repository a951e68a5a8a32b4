"""Canonical tokens of a text that is still growing.

A text stream's tokens must equal the tokenizer's own tokens of the whole text, and each
character is tokenised once. So tokens are emitted only up to a *cut*: a place in the text
where the tokenizer splits whatever comes later. A cut must be visible in full (both sides),
and every kind of cut is checked against the served tokenizer at start (``_usable_cuts``):
no vocabulary entry may span one, and splitting sample texts at one must change nothing.
A tokenizer for which no kind holds still works: its streams are tokenised at their end.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from array import array
from bisect import bisect_right
from typing import Any, NamedTuple

# Left context is one character (lookbehind), right context is a lookahead.
CUTS: dict[str, str] = {
    "word": r"(?<=[A-Za-z0-9])(?= [A-Za-z0-9])",
    "punctuation": r"(?<=[.,;:!?])(?= [A-Za-z])",
    "line": r"(?<=[A-Za-z0-9])(?=\n)",
}
_RIGHT_CONTEXT = 2
_SAMPLES = 96
# Where a vocabulary spells white space with a printable stand-in (byte-level, sentencepiece).
_SPELLINGS = str.maketrans({"Ġ": " ", "Ċ": "\n", "▁": " "})


class Mark(NamedTuple):
    """A cut already passed: the first ``chars`` characters are the first ``tokens`` tokens."""

    chars: int
    tokens: int


class Checkpoint(NamedTuple):
    """A state of a :class:`TokenBuffer` to go back to."""

    chars: int
    marks: int


class CanonicalTokenizer:
    """The served tokenizer and what was learned about where it splits.

    Args:
        tokenizer: a Hugging Face tokenizer, fast or slow.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encode = tokenizer.encode
        plain, special = self.encode("a"), self.encode("a", special=True)
        start = _find(special, plain)
        self.prefix = special[:start]
        self.suffix = special[start + len(plain) :]
        self.cuts = _usable_cuts(tokenizer, self.encode)
        self._cut = re.compile("|".join(CUTS[name] for name in self.cuts) or r"(?!)")

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of ``text`` on its own."""
        return self._encode(text, add_special_tokens=special)

    def last_cut(self, text: str, start: int) -> int:
        """The last cut in ``text`` after ``start``, or ``start`` if there is none."""
        last = start
        for match in self._cut.finditer(text, max(start, 1)):
            last = match.start()
        return last

    def is_cut(self, text: str, position: int) -> bool:
        return self._cut.match(text, position) is not None

    def encode_between(self, text: str, start: int, end: int) -> list[int]:
        """Tokens of ``text[start:end]`` in place; ``start`` is 0 or a cut."""
        if start == 0:
            return self.encode(text[:end])
        # A cut splits after its left character whatever stands before that, so one
        # character is context enough for tokenizers that treat a text's start specially.
        anchor = text[start - 1]
        return self.encode(anchor + text[start:end])[len(self.encode(anchor)) :]

    def digest(self) -> str:
        """A hash of vocabulary and rules: equal where two engines tokenise alike."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            rules = backend.to_str()
        else:
            rules = json.dumps(sorted(self._tokenizer.get_vocab().items()))
        return hashlib.sha256(rules.encode()).hexdigest()


class TokenBuffer:
    """A growing text and the prefix of its tokens that no later text can change.

    Args:
        tokenizer: shared by all buffers of a server.
        special: whether the tokenizer's own special tokens belong around the text, as for a
            plain ``text`` prompt, or not, as for a rendered chat template.
    """

    def __init__(self, tokenizer: CanonicalTokenizer, special: bool) -> None:
        self._tokenizer = tokenizer
        self.special = special
        self.text = ""
        self.tokens = array("q", tokenizer.prefix if special else [])
        self._marks = [Mark(0, len(self.tokens))]

    def append(self, text: str) -> None:
        """Add text; ``tokens`` grows by what has become certain."""
        self.text += text
        start = self._marks[-1].chars
        cut = self._tokenizer.last_cut(self.text, start)
        if cut > start:
            self.tokens.extend(self._tokenizer.encode_between(self.text, start, cut))
            self._marks.append(Mark(cut, len(self.tokens)))

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(len(self.text), len(self._marks))

    def restore(self, state: Checkpoint) -> None:
        """Undo every append since ``state`` was taken."""
        self.text = self.text[: state.chars]
        del self._marks[state.marks :]
        del self.tokens[self._marks[-1].tokens :]

    def all_tokens(self) -> list[int]:
        """Tokens of the text as if it ended here."""
        return self.encode(self.text, self.special)

    def encode(self, text: str, special: bool) -> list[int]:
        """Tokens of a whole prompt, tokenising only what this buffer has not tokenised yet.

        Where ``text`` departs from the buffered text, tokens up to the last cut before that
        place are reused.
        """
        if special != self.special and (self._tokenizer.prefix or self._tokenizer.suffix):
            return self._tokenizer.encode(text, special)
        mark = self._shared_mark(text)
        ids = self.tokens[: mark.tokens].tolist()
        ids += self._tokenizer.encode_between(text, mark.chars, len(text))
        return ids + self._tokenizer.suffix if special else ids

    def common_chars(self, text: str) -> int:
        """How many leading characters ``text`` shares with the buffered text."""
        if text.startswith(self.text):
            return len(self.text)
        low, high = 0, min(len(text), len(self.text))
        while low < high:
            middle = (low + high + 1) // 2
            if text.startswith(self.text[low:middle], low):
                low = middle
            else:
                high = middle - 1
        return low

    def _shared_mark(self, text: str) -> Mark:
        shared = self.common_chars(text)
        index = bisect_right(self._marks, shared, key=lambda mark: mark.chars) - 1
        # Both sides of the cut must be there in the new text as well.
        while index > 0 and not self._tokenizer.is_cut(text, self._marks[index].chars):
            index -= 1
        return self._marks[index]


def _find(haystack: list[int], needle: list[int]) -> int:
    for start in range(len(haystack) - len(needle) + 1):
        if haystack[start : start + len(needle)] == needle:
            return start
    raise ValueError(
        "the tokenizer encodes 'a' differently with and without special tokens; "
        "prompt streams cannot be used with it"
    )


def _usable_cuts(tokenizer: Any, encode: Any) -> list[str]:
    """The kinds of cut that hold for this tokenizer, in the order of ``CUTS``."""
    added = [str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()]
    swallowing = [
        str(token)
        for token in getattr(tokenizer, "added_tokens_decoder", {}).values()
        if getattr(token, "rstrip", False) or getattr(token, "lstrip", False)
    ]
    vocabulary = [token.translate(_SPELLINGS) for token in tokenizer.get_vocab()] + added
    samples = _sample_texts(vocabulary, added)
    usable: list[str] = []
    for name, pattern in CUTS.items():
        cut = re.compile(pattern)
        # A token that takes the white space beside it takes the cut's right side with it.
        swallowed = any(
            cut.search(f"{token} a") or cut.search(f"{token}\n") for token in swallowing
        )
        spanned = any(_has_inner_cut(cut, entry) for entry in vocabulary)
        if not swallowed and not spanned and _splits(cut, samples, encode):
            usable.append(name)
    return usable


def _has_inner_cut(cut: re.Pattern[str], entry: str) -> bool:
    # One more letter on the right, so that a cut whose right context ends the entry counts.
    return any(0 < match.start() < len(entry) for match in cut.finditer(entry + "a"))


def _sample_texts(vocabulary: list[str], added: list[str]) -> list[str]:
    """Random texts of vocabulary entries and trouble, the same at every start."""
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


def _splits(cut: re.Pattern[str], samples: list[str], encode: Any) -> bool:
    for text in samples:
        for match in list(cut.finditer(text))[:4]:
            at = match.start()
            anchor = text[at - 1]
            rest = encode(anchor + text[at:])[len(encode(anchor)) :]
            if encode(text[:at]) + rest != encode(text):
                return False
            # What follows the cut's own context must not matter either.
            near = text[: at + _RIGHT_CONTEXT]
            if encode(near)[: len(encode(text[:at]))] != encode(text[:at]):
                return False
    return True
