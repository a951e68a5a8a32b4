"""Canonical tokens of a text that is still growing.

A text stream's tokens must equal the tokenizer's own tokens of the whole text, and each
character is tokenised once. So tokens are emitted only up to a *boundary*: a place in the text
where the tokenizer splits whatever comes later (``token_boundaries.py``).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from array import array
from bisect import bisect_right
from typing import Any, NamedTuple

from flashmoa_sglang.http.token_boundaries import BOUNDARIES, find_boundaries, vocabulary_of

logger = logging.getLogger(__name__)


class TokenizedPrefix(NamedTuple):
    """A boundary already passed: the first ``chars`` characters are the first ``tokens`` tokens."""

    chars: int
    tokens: int


class Checkpoint(NamedTuple):
    """A state of a :class:`TokenBuffer` to go back to."""

    chars: int
    prefixes: int


class Sealed(NamedTuple):
    """Text before a :class:`TokenBuffer` that the server encodes on its own."""

    text: str
    special: bool
    tokens: list[int]


class CanonicalTokenizer:
    """The served tokenizer and what was learned about where it splits.

    Args:
        tokenizer: a Hugging Face tokenizer, fast or slow.

    Raises:
        Exception: whatever a tokenizer raises that does not encode as those do.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encode = tokenizer.encode
        plain, special = self.encode("a"), self.encode("a", special=True)
        start = _find(special, plain)
        self.prefix = special[:start]
        self.suffix = special[start + len(plain) :]
        self.bos = getattr(tokenizer, "bos_token_id", None)
        self.boundaries = find_boundaries(tokenizer, self.encode)
        self._boundary = re.compile(
            "|".join(BOUNDARIES[name] for name in self.boundaries) or r"(?!)"
        )

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the token ids of ``text`` on its own."""
        return self._encode(text, add_special_tokens=special)

    def last_boundary(self, text: str, start: int) -> int:
        """Return the last boundary in ``text`` after ``start``, or ``start`` if there is none."""
        last = start
        for match in self._boundary.finditer(text, max(start, 1)):
            last = match.start()
        return last

    def is_boundary(self, text: str, position: int) -> bool:
        return self._boundary.match(text, position) is not None

    def encode_between(self, text: str, start: int, end: int) -> list[int]:
        """Return the tokens of ``text[start:end]`` in place; ``start`` is 0 or a boundary."""
        if start == 0:
            return self.encode(text[:end])
        # A boundary splits after its left character whatever stands before that, so one
        # character is context enough for tokenizers that treat a text's start specially.
        anchor = text[start - 1]
        return self.encode(anchor + text[start:end])[len(self.encode(anchor)) :]

    def digest(self) -> str | None:
        """Hash the vocabulary and the rules: equal where two engines tokenise alike.

        ``None`` where the tokenizer tells neither.
        """
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        try:
            if backend is not None:
                rules = backend.to_str()
            else:
                rules = json.dumps(sorted(vocabulary_of(self._tokenizer).items()))
        except Exception as error:
            logger.info("The tokenizer has no digest: %s", error)
            return None
        return hashlib.sha256(rules.encode()).hexdigest()


def canonical(tokenizer: Any) -> CanonicalTokenizer | None:
    """Learn about a tokenizer; log once, and return ``None``, where it cannot be used."""
    if tokenizer is None:
        return None
    try:
        return CanonicalTokenizer(tokenizer)
    except Exception as error:
        logger.warning(
            "Prompt streams take token ids only: the tokenizer does not encode as Hugging Face's "
            "do (%s: %s)",
            type(error).__name__,
            error,
        )
        return None


class TokenBuffer:
    """A growing text and the prefix of its tokens that no later text can change.

    Args:
        tokenizer: shared by all buffers of a server.
        special: whether the tokenizer's own special tokens belong around the text, as for a
            plain ``text`` prompt, or not, as for a rendered chat template.
        head: what stands before the text and never mixes with it: a chat's rendered prompt
            before the answer that the model is to continue.
    """

    def __init__(
        self, tokenizer: CanonicalTokenizer, special: bool, head: Sealed | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._head = head
        self.special = special
        self.text = ""
        self._lead = tokenizer.prefix if special else []
        if head is not None:
            # As SGLang joins the two.
            again = self._lead[:1] == [tokenizer.bos]
            self._lead = head.tokens + self._lead[1 if again else 0 :]
        self.tokens = array("q", self._lead)
        self._prefixes = [TokenizedPrefix(0, len(self.tokens))]

    @property
    def whole_text(self) -> str:
        """The text with what stands before it."""
        return self._head.text + self.text if self._head is not None else self.text

    def append(self, text: str) -> None:
        """Add text; ``tokens`` grows by what has become certain."""
        self.text += text
        start = self._prefixes[-1].chars
        boundary = self._tokenizer.last_boundary(self.text, start)
        if boundary > start:
            self.tokens.extend(self._tokenizer.encode_between(self.text, start, boundary))
            self._prefixes.append(TokenizedPrefix(boundary, len(self.tokens)))

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(len(self.text), len(self._prefixes))

    def restore(self, state: Checkpoint) -> None:
        """Undo every append since ``state`` was taken."""
        self.text = self.text[: state.chars]
        del self._prefixes[state.prefixes :]
        del self.tokens[self._prefixes[-1].tokens :]

    def all_tokens(self) -> list[int]:
        """Return the tokens of the text as if it ended here."""
        own = self.encode(self.text, self.special)
        return self._lead + own[len(self._tokenizer.prefix) if self.special else 0 :]

    def encode_piece(self, text: str, special: bool, first: bool) -> list[int]:
        """Return the tokens of a prompt, or of the ``first`` or a later piece of one."""
        if self._head is None or not first:
            return self.encode(text, special)
        if (text, special) == (self._head.text, self._head.special):
            return list(self._head.tokens)
        return self._tokenizer.encode(text, special)

    def encode(self, text: str, special: bool) -> list[int]:
        """Return a whole prompt's tokens, tokenising only what this buffer has not tokenised yet.

        Where ``text`` departs from the buffered text, tokens up to the last boundary before that
        place are reused.
        """
        if special != self.special and (self._tokenizer.prefix or self._tokenizer.suffix):
            return self._tokenizer.encode(text, special)
        prefix = self._shared_prefix(text)
        ids = list(self._tokenizer.prefix) if special else []
        ids += self.tokens[len(self._lead) : prefix.tokens]
        ids += self._tokenizer.encode_between(text, prefix.chars, len(text))
        return ids + self._tokenizer.suffix if special else ids

    def common_chars(self, text: str) -> int:
        """Return how many leading characters ``text`` shares with the buffered text."""
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

    def _shared_prefix(self, text: str) -> TokenizedPrefix:
        shared = self.common_chars(text)
        index = bisect_right(self._prefixes, shared, key=lambda prefix: prefix.chars) - 1
        # Both sides of the boundary must be there in the new text as well.
        while index > 0 and not self._tokenizer.is_boundary(text, self._prefixes[index].chars):
            index -= 1
        return self._prefixes[index]


def _find(haystack: list[int], needle: list[int]) -> int:
    for start in range(len(haystack) - len(needle) + 1):
        if haystack[start : start + len(needle)] == needle:
            return start
    raise ValueError(
        "the tokenizer encodes 'a' differently with and without special tokens; "
        "prompt streams cannot be used with it"
    )
