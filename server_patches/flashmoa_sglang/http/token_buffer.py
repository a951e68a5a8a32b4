"""``TokenBuffer``: the canonical tokens of a text that is still growing.

The tokens of a stream of text must equal the tokens of the whole text, and each character is
tokenised only once. So tokens are emitted only up to a *boundary*: a place at which the tokenizer
always splits, whatever text follows (``token_boundaries.py``).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from flashmoa_sglang.http.token_boundaries import (
    BOUNDARIES,
    RIGHT_CONTEXT,
    find_boundaries,
    vocabulary_of,
)

logger = logging.getLogger(__name__)


class TokenizedPrefix(NamedTuple):
    """A boundary in the buffer: the first ``chars`` characters are the first ``tokens`` tokens."""

    chars: int
    tokens: int


class Checkpoint(NamedTuple):
    """A state of a :class:`TokenBuffer` that can be restored."""

    chars: int
    prefixes: int


class EncodedHead(NamedTuple):
    """Text before that of a :class:`TokenBuffer`, which SGLang encodes separately."""

    text: str
    add_special_tokens: bool
    tokens: list[int]


class CanonicalTokenizer:
    """The served tokenizer, the special tokens that it adds, and the boundaries at which it splits.

    Args:
        tokenizer: a Hugging Face tokenizer, fast or slow.

    Raises:
        Exception: of any class, if the tokenizer does not encode as Hugging Face's do.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encode = tokenizer.encode
        plain, with_special = self.encode("a"), self.encode("a", add_special_tokens=True)
        start = _find_sublist(with_special, plain)
        self.prefix = with_special[:start]
        self.suffix = with_special[start + len(plain) :]
        self.bos = getattr(tokenizer, "bos_token_id", None)
        self.boundaries = find_boundaries(tokenizer, self.encode)
        self._boundary = re.compile(
            "|".join(BOUNDARIES[name] for name in self.boundaries) or r"(?!)"
        )

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a whole text."""
        return self._encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with the special ones."""
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def last_boundary(self, text: str, start: int) -> int:
        """Return the last boundary in ``text`` after ``start``, or ``start`` if there is none."""
        last = start
        for match in self._boundary.finditer(text, max(start, 1)):
            last = match.start()
        return last

    def is_boundary(self, text: str, position: int) -> bool:
        return self._boundary.match(text, position) is not None

    def encode_between(self, text: str, start: int, end: int) -> list[int]:
        """Return the tokens of ``text[start:end]`` in ``text``; ``start`` is 0 or a boundary."""
        if start == 0:
            return self.encode(text[:end])
        # Some tokenizers treat the start of a text specially. One character before is enough
        # context, because a boundary splits after it whatever text is before it.
        anchor = text[start - 1]
        return self.encode(anchor + text[start:end])[len(self.encode(anchor)) :]

    def digest(self) -> str | None:
        """Return a hash of vocabulary and rules, equal for engines that tokenise alike.

        Return ``None`` if the tokenizer shows neither.
        """
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        try:
            if backend is not None:
                rules = backend.to_str()
            else:
                rules = json.dumps(sorted(vocabulary_of(self._tokenizer).items()))
        except Exception as error:
            text = "/flashmoa/info has no digest of the tokenizer, which cannot be read: %s"
            logger.info(text, error)
            return None
        return hashlib.sha256(rules.encode()).hexdigest()


def make_canonical(tokenizer: Any) -> CanonicalTokenizer | None:
    """Wrap a tokenizer; if it cannot be used, log why and return ``None``."""
    if tokenizer is None:
        return None
    try:
        return CanonicalTokenizer(tokenizer)
    except Exception as error:
        logger.warning(
            "Prompt streams accept token ids only, because this tokenizer does not encode like "
            "those of Hugging Face (%s: %s)",
            type(error).__name__,
            error,
        )
        return None


class TokenBuffer:
    """A growing text, and the prefix of its tokens that no later text can change.

    Args:
        tokenizer: the tokenizer, which all buffers of a server share.
        add_special_tokens: whether the tokenizer's special tokens are added to the text, as for a
            plain ``text`` prompt, or not, as for a rendered chat.
        head: text that is encoded separately and comes before: the rendered chat, if the buffer is
            for an answer that the model continues.

    Attributes:
        tokens: the tokens of the head and of the text up to the last boundary.
    """

    def __init__(
        self,
        tokenizer: CanonicalTokenizer,
        add_special_tokens: bool,
        head: EncodedHead | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._head = head
        self.add_special_tokens = add_special_tokens
        self.text = ""
        self._lead = tokenizer.prefix if add_special_tokens else []
        if head is not None:
            # Like SGLang, drop a beginning-of-text token between the two.
            has_bos = self._lead[:1] == [tokenizer.bos]
            self._lead = head.tokens + self._lead[1 if has_bos else 0 :]
        self.tokens = array("q", self._lead)
        self._prefixes = [TokenizedPrefix(0, len(self.tokens))]
        # There is no boundary between the last prefix and this place.
        self._searched = 0

    @property
    def whole_text(self) -> str:
        """The text, with the head's text before it."""
        return self._head.text + self.text if self._head is not None else self.text

    def append(self, text: str) -> None:
        """Add text, and to ``tokens`` the tokens that have become certain."""
        self.text += text
        start = self._prefixes[-1].chars
        # Some languages have no boundaries for long, and are not searched again and again.
        search_from = max(start, self._searched)
        boundary = self._tokenizer.last_boundary(self.text, search_from)
        # Whether the last characters are at one depends on what follows them.
        self._searched = len(self.text) - RIGHT_CONTEXT
        if boundary > search_from:
            self.tokens.extend(self._tokenizer.encode_between(self.text, start, boundary))
            self._prefixes.append(TokenizedPrefix(boundary, len(self.tokens)))

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(len(self.text), len(self._prefixes))

    def restore(self, state: Checkpoint) -> None:
        """Undo every append since ``state`` was taken."""
        self.text = self.text[: state.chars]
        del self._prefixes[state.prefixes :]
        del self.tokens[self._prefixes[-1].tokens :]
        self._searched = min(self._searched, len(self.text) - RIGHT_CONTEXT)

    def all_tokens(self) -> list[int]:
        """Return the tokens of the text as if it ended here."""
        tokens = self.encode(self.text, self.add_special_tokens)
        skipped = len(self._tokenizer.prefix) if self.add_special_tokens else 0
        return self._lead + tokens[skipped:]

    def encode_piece(self, text: str, add_special_tokens: bool, first: bool) -> list[int]:
        """Return the tokens of a prompt, or of a piece of one.

        Args: first: whether this is the first piece, or the only one.
        """
        if self._head is None or not first:
            return self.encode(text, add_special_tokens)
        if (text, add_special_tokens) == (self._head.text, self._head.add_special_tokens):
            return list(self._head.tokens)
        return self._tokenizer.encode(text, add_special_tokens)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return a text's tokens, tokenising only the part that this buffer has not tokenised yet.

        If ``text`` departs from the buffered text, tokens up to the last boundary before that place
        are reused.
        """
        tokenizer = self._tokenizer
        if add_special_tokens != self.add_special_tokens and (tokenizer.prefix or tokenizer.suffix):
            return tokenizer.encode(text, add_special_tokens)
        prefix = self._shared_prefix(text)
        ids = list(tokenizer.prefix) if add_special_tokens else []
        ids += self.tokens[len(self._lead) : prefix.tokens]
        ids += tokenizer.encode_between(text, prefix.chars, len(text))
        return ids + tokenizer.suffix if add_special_tokens else ids

    def _shared_prefix(self, text: str) -> TokenizedPrefix:
        shared = common_length(text, self.text)
        index = bisect_right(self._prefixes, shared, key=lambda prefix: prefix.chars) - 1
        # The new text must have a boundary at the same place, with both of its sides.
        while index > 0 and not self._tokenizer.is_boundary(text, self._prefixes[index].chars):
            index -= 1
        return self._prefixes[index]


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common prefix of two texts, or of two arrays of tokens."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _find_sublist(haystack: list[int], needle: list[int]) -> int:
    for start in range(len(haystack) - len(needle) + 1):
        if haystack[start : start + len(needle)] == needle:
            return start
    raise ValueError(
        f"'a' with special tokens is {haystack}, which does not contain {needle}, the tokens "
        "without them"
    )
