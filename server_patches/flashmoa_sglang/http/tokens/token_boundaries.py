"""Finds boundaries: places in a text at which a tokenizer always splits, whatever text follows.

Whether a place is one follows from the parts of the tokenizer (``tokenizer_parts.py``) and from the
characters around it. There is no boundary where this is not certain.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy

from flashmoa_sglang.http.tokens.expressions import NotUnderstood
from flashmoa_sglang.http.tokens.split_patterns import SplitPattern
from flashmoa_sglang.http.tokens.tokenizer_parts import (
    AddedTokens,
    Combining,
    Ends,
    Part,
    Split,
    Unknown,
    in_order,
    read_affixes,
    read_parts,
    starts_afresh,
)

logger = logging.getLogger(__name__)

# Number of characters after a boundary that must be known.
RIGHT_CONTEXT = 2
# There is no boundary beside more characters that combine than this.
_MAX_COMBINED = 16
# Number of places at the end of a text that are tried. A long text has boundaries in all its parts.
_MAX_PLACES = 1024
_MAX_REMEMBERED = 1 << 15
# The names of usual boundaries, each with texts before and after a boundary.
KINDS: dict[str, tuple[tuple[str, str], ...]] = {
    "word": (("n", " n"), ("ы", " ы"), (".", " n")),
    "symbol": (("n", " -"), (",", ' "')),
    "line": (("n", "\nn"), ("文", "\n文")),
    "next line": (("\n", "no"), ("\n", "文文")),
    "end of word": (("n", ", "), ("ы", ". ")),
    "end of foreign word": (("文", "，文"), ("n", "。文")),
    "number after a letter": (("n", "1 "), ("文", "10")),
    "letter after a number": (("1", "n "), ("9", "文文")),
    "number after a symbol": (("-", "1 "), ("(", "10")),
}
# Texts that show whether a tokenizer's own code changes text before its parts do.
_SAMPLES = (
    "  The Café, e\u0301\u00a0I'LL  1234 ＮＡＭＥ\t\n\n 中文，한국어 and… so ON\r\n<tag>  ",
    "\n x",
    " ",
)
# Characters of the longest text for which a tokenizer's own code is tried.
_LONGEST_TRIED = 20_000


class Boundaries:
    """The boundaries of a tokenizer.

    Args:
        parts: the parts of the tokenizer; none if it was refused.
        are_separate: whether two neighbouring characters never combine.

    Attributes:
        longest: the number of characters of the longest text that has boundaries.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        are_separate: Callable[[str, str], bool],
        longest: int = sys.maxsize,
    ) -> None:
        self._parts = parts
        self.longest = longest
        self._are_separate = are_separate
        self._known: dict[Ends, bool] = {}
        combining = [number for number, part in enumerate(parts) if isinstance(part, Combining)]
        self._see_after = parts[: combining[-1] + 1] if combining else ()
        usual = (each for each in "a0文" if self._is_kept(each))
        self._usual_after = next(usual, "") if combining else ""
        self._short_after = lru_cache(_MAX_REMEMBERED)(self._shorten_after)

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def kinds(self) -> list[str]:
        """The names of the usual boundaries that this tokenizer has."""
        return [
            name
            for name, sides in KINDS.items()
            if all(self.holds_at(left + right, len(left)) for left, right in sides)
        ]

    def last(self, text: str, start: int, end: int) -> int:
        """Return the last boundary of ``text[:end]`` after ``start``, or else ``start``."""
        if not self._parts:
            return start
        last = min(end, len(text) - 1, self.longest)
        places = range(last, max(start, end - _MAX_PLACES), -1)
        return next((place for place in places if self.holds_at(text, place)), start)

    def anchor(self, text: str, place: int) -> str:
        """Return the text before a boundary that has the same boundary by itself."""
        start, first = place - 1, max(0, place - _MAX_COMBINED)
        while start > first and not self._are_separate(text[start - 1], text[start]):
            start -= 1
        return text[start:place]

    def holds_at(self, text: str, place: int) -> bool:
        ends = self._ends(text, place)
        if ends is None:
            return False
        holds = self._known.get(ends)
        if holds is None:
            if len(self._known) > _MAX_REMEMBERED:
                self._known.clear()
            holds = self._known[ends] = _splits(self._parts, ends)
        return holds

    def _ends(self, text: str, place: int) -> Ends | None:
        """Return the characters around a place; ``None`` if there are too few or too many."""
        are_separate = self._are_separate
        if not 0 < place < len(text) - 1 or not are_separate(text[place - 1], text[place]):
            return None
        end, last = place + 1, min(len(text), place + _MAX_COMBINED)
        while end < last and not are_separate(text[end - 1], text[end]):
            end += 1
        left = self.anchor(text, place)
        if end == last or len(left) == _MAX_COMBINED:
            return None
        return Ends(left, text[place:end], self._short_after(text[end]))

    def _is_kept(self, character: str) -> bool:
        return all(part.keeps(character) for part in self._see_after)

    def _shorten_after(self, character: str) -> str:
        """Return the same character for all characters that no part changes."""
        return self._usual_after if self._is_kept(character) else character


def _splits(parts: Sequence[Part], ends: Ends) -> bool:
    for number, part in enumerate(parts):
        verdict = part(ends)
        if isinstance(verdict, bool):
            return verdict
        *others, ends = verdict
        if not all(_splits(parts[number + 1 :], other) for other in others):
            return False
    return False


class Known(NamedTuple):
    """Facts that follow from the parts of a tokenizer.

    Attributes:
        affixes: the special tokens that it adds before and after a text; ``None`` if unknown.
    """

    boundaries: Boundaries
    affixes: tuple[list[int], list[int]] | None


def read_tokenizer(tokenizer: Any, encode: Callable[[str], Sequence[int]]) -> Known:
    """Return the facts of a tokenizer; if it is refused, log why."""
    try:
        known, encode_with_parts = read(tokenizer)
        longest = known.boundaries.longest
        long = [each * longest for each in "文 "] if longest <= _LONGEST_TRIED else []
        for sample in (*_SAMPLES, *long):
            if not _are_same(encode(sample), encode_with_parts(sample)):
                raise NotUnderstood(f"{type(tokenizer).__name__} changes text in its own way")
    except Exception as error:
        logger.warning(
            "Tokens of prompt streams of text are certain when they end, not earlier, because it "
            "could not be found out where this tokenizer splits text (%s: %s)",
            type(error).__name__,
            error,
        )
        return Known(Boundaries((), starts_afresh), None)
    return known


def _are_same(tokens: Sequence[int], others: Sequence[int]) -> bool:
    """Return whether tokens are the same, except that one side may count from a higher number.

    Mistral's tokenizers number their special tokens first.
    """
    differences = {token - other for token, other in zip(tokens, others, strict=False)}
    return len(tokens) == len(others) and len(differences) <= 1


def read(tokenizer: Any) -> tuple[Known, Callable[[str], Sequence[int]]]:
    """Return the facts of a tokenizer, and a function that encodes with its parts alone.

    Raises: NotUnderstood
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        if getattr(backend.model, "alpha", None):
            raise NotUnderstood("a random model")
        spec = json.loads(backend.to_str())
        known = Known(Boundaries(*read_parts(spec)), read_affixes(spec))
        return known, lambda text: backend.encode(text, add_special_tokens=False).ids
    encoding = _find_encoding(tokenizer, depth=4)
    if encoding is None:
        raise NotUnderstood(type(tokenizer).__name__)
    return _read_tiktoken(encoding, tokenizer)


def _find_encoding(wrapper: Any, depth: int) -> Any:
    """Return the tokenizer of tiktoken that another tokenizer, or a part of it, wraps."""
    tiktoken: Any = sys.modules.get("tiktoken")
    if tiktoken is None or isinstance(wrapper, tiktoken.Encoding):
        return wrapper if tiktoken is not None else None
    attributes = getattr(wrapper, "__dict__", {}).values() if depth else ()
    return next(filter(None, (_find_encoding(each, depth - 1) for each in attributes)), None)


def _read_tiktoken(encoding: Any, tokenizer: Any) -> tuple[Known, Callable[[str], Sequence[int]]]:
    """Return the same for a tokenizer that wraps one of tiktoken's, which panics at long texts.

    Models come with wrappers that cut long texts. SGLang's own does not.
    """
    options = dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
    tokens = {text: {**options} for text in encoding.special_tokens_set}
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        tokens[str(token)] = {name: getattr(token, name) for name in options}
    pattern = SplitPattern(encoding._pat_str, _tiktoken_engine, True)
    added = AddedTokens([*tokens.values()], [*tokens])
    parts = in_order([added, Split(pattern, "Isolated"), Unknown()])

    def encode(text: str) -> Sequence[int]:
        return encoding.encode(text, allowed_special="all", disallowed_special=())

    is_known = type(tokenizer).__module__.startswith(("sglang.", "transformers."))
    longest = sys.maxsize if is_known else _LONGEST_TRIED
    return Known(Boundaries(parts, starts_afresh, longest), None), encode


def _tiktoken_engine(expression: str) -> Callable[[str], Any]:
    """Compile an expression for one character, as tiktoken does."""
    import tiktoken

    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding(
        "character", pat_str=expression, mergeable_ranks=ranks, special_tokens={}
    )

    def matches(characters: str) -> Any:
        found = {*bytes(encoding.encode_ordinary(characters)).decode()}
        return numpy.array([character in found for character in characters])

    return matches
