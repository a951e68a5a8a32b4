"""Finds boundaries: places in a text where a tokenizer always splits, whatever text follows.

Whether a place is a boundary follows from the parts of the tokenizer (``tokenizer_parts.py``) and
from the characters around the place. A place is no boundary where this is not certain.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy

from flashmoa_sglang.http.tokens.expressions import NotUnderstood
from flashmoa_sglang.http.tokens.split_patterns import SplitPattern
from flashmoa_sglang.http.tokens.tokenizer_parts import (
    AddedTokens,
    Ends,
    Part,
    read_parts,
    split_at,
    starts_afresh,
)

logger = logging.getLogger(__name__)

# Number of characters after a boundary that must be known.
RIGHT_CONTEXT = 2
# No boundary is beside a character with more marks than this.
_MAX_MARKS = 16
# Number of characters up to which a tokenizer's own code is tried.
_LONGEST_TRIED = 20_000
# Texts that show whether a tokenizer's own code changes text before its parts do.
SAMPLES = (
    "  The Café, e\u0301\u00a0I'LL  1234 ＮＡＭＥ\t\n\n 中文，한국어 and… so ON\r\n<tag>  ",
    "\n x",
    " ",
)


class Boundaries:
    """The boundaries of a tokenizer.

    Args: parts: the parts of the tokenizer; none if it was refused.

    Attributes:
        longest: the number of characters of the longest text that has boundaries.
    """

    def __init__(self, parts: Sequence[Part], longest: int = sys.maxsize) -> None:
        self._parts = parts
        self.longest = longest
        self._always_splits = lru_cache(maxsize=1 << 15)(self._find_split)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def last(self, text: str, start: int, end: int) -> int:
        """Return the last boundary of ``text[:end]`` after ``start``, or else ``start``."""
        if not self._parts:
            return start
        last = min(end, len(text) - RIGHT_CONTEXT, self.longest)
        # A long text has boundaries in all its parts, so that its end is enough.
        places = range(last, max(start, end - 1024), -1)
        return next((place for place in places if self.holds_at(text, place)), start)

    def anchor(self, text: str, place: int) -> str:
        """Return the text before a boundary that has the same boundary by itself."""
        start, first = place - 1, max(0, place - _MAX_MARKS)
        while start > first and not starts_afresh(text[start]):
            start -= 1
        return text[start:place]

    def holds_at(self, text: str, place: int) -> bool:
        """Return whether a place is a boundary."""
        if not 0 < place <= len(text) - RIGHT_CONTEXT or not starts_afresh(text[place]):
            return False
        end, last = place + 1, min(len(text), place + _MAX_MARKS)
        while end < last and not starts_afresh(text[end]):
            end += 1
        left = self.anchor(text, place)
        if end == last or not starts_afresh(left[0]):
            return False
        return self._always_splits(Ends(left, text[place:end]))

    def _find_split(self, ends: Ends) -> bool:
        for part in self._parts:
            verdict = part(ends)
            if isinstance(verdict, bool):
                return verdict
            ends = verdict
        return False


def read_tokenizer(tokenizer: Any, encode: Callable[[str], Sequence[int]]) -> Boundaries:
    """Return the boundaries of a tokenizer; if it is refused, log why and return none."""
    try:
        boundaries, encode_with_parts = read(tokenizer)
        longest = boundaries.longest
        long = [each * longest for each in "文 "] if longest <= _LONGEST_TRIED else []
        for sample in (*SAMPLES, *long):
            if not _are_same(encode(sample), encode_with_parts(sample)):
                raise NotUnderstood(f"{type(tokenizer).__name__} changes text in its own way")
    except Exception as error:
        logger.warning(
            "Tokens of prompt streams of text are certain when they end, not earlier, because it "
            "could not be found out where this tokenizer splits text (%s: %s)",
            type(error).__name__,
            error,
        )
        return Boundaries(())
    return boundaries


def _are_same(tokens: Sequence[int], others: Sequence[int]) -> bool:
    """Return whether tokens are the same, except that one side may count from a higher number.

    Mistral's tokenizers number their special tokens first.
    """
    differences = {token - other for token, other in zip(tokens, others, strict=False)}
    return len(tokens) == len(others) and len(differences) <= 1


def read(tokenizer: Any) -> tuple[Boundaries, Callable[[str], Sequence[int]]]:
    """Return a tokenizer's boundaries, and a function that encodes with its parts alone.

    Raises: NotUnderstood
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _read_tiktoken(tokenizer)
    if getattr(backend.model, "alpha", None):
        raise NotUnderstood("a random model")
    boundaries = Boundaries(read_parts(json.loads(backend.to_str())))
    return boundaries, lambda text: backend.encode(text, add_special_tokens=False).ids


def _find_encoding(wrapper: Any, depth: int) -> Any:
    """Return tiktoken's tokenizer inside another tokenizer, at most some attributes deep."""
    tiktoken: Any = sys.modules.get("tiktoken")
    if tiktoken is None or isinstance(wrapper, tiktoken.Encoding):
        return wrapper if tiktoken is not None else None
    attributes = getattr(wrapper, "__dict__", {}).values() if depth else ()
    return next(filter(None, (_find_encoding(each, depth - 1) for each in attributes)), None)


def _read_tiktoken(tokenizer: Any) -> tuple[Boundaries, Callable[[str], Sequence[int]]]:
    """Read a tokenizer that wraps tiktoken's, which panics at long texts.

    Models come with wrappers that cut long texts. SGLang's own wrapper does not.
    """
    encoding = _find_encoding(tokenizer, depth=4)
    if encoding is None:
        raise NotUnderstood(type(tokenizer).__name__)
    options = dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
    tokens = {text: {**options} for text in encoding.special_tokens_set}
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        tokens[str(token)] = {name: getattr(token, name) for name in options}
    added = AddedTokens([*tokens.values()], [*tokens], marks_beginnings=False)
    split = split_at(SplitPattern(encoding._pat_str, _tiktoken_engine), "Isolated")

    def encode(text: str) -> Sequence[int]:
        return encoding.encode(text, allowed_special="all", disallowed_special=())

    is_known = type(tokenizer).__module__.startswith(("sglang.", "transformers."))
    longest = sys.maxsize if is_known else _LONGEST_TRIED
    return Boundaries([added, split], longest), encode


def _tiktoken_engine(expression: str) -> Callable[[str], Any]:
    """Compile the expression of a class, as tiktoken does."""
    import tiktoken

    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding(
        "character", pat_str=expression, mergeable_ranks=ranks, special_tokens={}
    )

    def matches(characters: str) -> Any:
        found = {*bytes(encoding.encode_ordinary(characters)).decode()}
        return numpy.array([character in found for character in characters])

    return matches
