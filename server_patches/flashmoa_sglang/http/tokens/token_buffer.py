"""``TokenBuffer``: the canonical tokens of a text that is still growing.

The tokens of a prompt must equal the tokens of its whole text. Tokens are certain up to the last
*boundary*: a place where the tokenizer always splits, whatever text follows
(``token_boundaries.py``). Thai or a long number may have no boundary for long. Such text is
tokenised *ahead*: the buffer tokenises a window of its last tokens again, together with the new
text, and the window must give the same tokens. If later text still changes a token, the buffer
takes back this token and all tokens after it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from flashmoa_sglang.http.tokens.token_boundaries import RIGHT_CONTEXT, SAMPLES, read_tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TokenizedPrefix(NamedTuple):
    """A boundary in the buffer: the first ``chars`` characters are the first ``tokens`` tokens."""

    chars: int
    tokens: int


# Texts of more characters take longer than other requests should wait.
LONG_TEXT = 1 << 14
# Number of characters at a text's end whose tokens often change with the next text. They are not
# tokenised ahead. Text after a boundary is tokenised ahead once it has twice as many characters.
_UNSETTLED_CHARACTERS = 16
# A window begins this many tokens before the new tokens. The last three quarters of the window must
# come out again; a tokenizer may treat the start of a text specially.
_WINDOW_TOKENS = 16


class EncodedHead(NamedTuple):
    """Text in front of a :class:`TokenBuffer`'s text, which SGLang encodes separately."""

    text: str
    add_special_tokens: bool
    tokens: list[int]


class CanonicalTokenizer:
    """The served tokenizer, the special tokens that it adds, and its boundaries.

    Args:
        tokenizer: a Hugging Face tokenizer, fast or slow.

    Raises:
        Exception: of any class, if the tokenizer does not encode as Hugging Face's tokenizers do.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encode = tokenizer.encode
        self.encode("")
        self.boundaries = read_tokenizer(tokenizer, self.encode)
        self.prefix, self.suffix = self._find_affixes()
        self.bos = getattr(tokenizer, "bos_token_id", None)
        self._has_failed = False

    def _find_affixes(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that the tokenizer adds before and after each text."""
        found = [self._affixes_of(text) for text in ("a", *SAMPLES) if self.encode(text)]
        if not found or any(affixes != found[0] for affixes in found):
            raise ValueError("it adds no fixed special tokens to each text, or has no tokens")
        return found[0]

    def _affixes_of(self, text: str) -> tuple[list[int], list[int]]:
        plain, whole = self.encode(text), self.encode(text, add_special_tokens=True)
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
        raise ValueError(f"with special tokens, {text!r} has other tokens of its own")

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._encode(text, add_special_tokens=add_special_tokens)

    def encode_window(
        self, text: str, start: int, end: int, anchored: bool
    ) -> list[tuple[int, int]] | None:
        """Tokenise ``text[start:end]`` by itself, or as in ``encode_between`` if ``anchored``.

        Return each token with the place in ``text`` where the token ends, or -1 if it ends inside a
        character. Return ``None`` if the tokenizer does not tell places.
        """
        if not getattr(self._tokenizer, "is_fast", False):
            return None
        first = start - len(self.boundaries.anchor(text, start)) if anchored and start else start
        try:
            encoded = self._tokenizer(
                text[first:end], add_special_tokens=False, return_offsets_mapping=True
            )
            places = encoded["offset_mapping"]
            following = [*places[1:], (end, end)][: len(places)]
            return [
                (token, first + place[1] if after[0] >= place[1] else -1)
                for token, place, after in zip(encoded["input_ids"], places, following, strict=True)
                if place[1] > start - first
            ]
        except Exception as error:
            if not self._has_failed:
                message = "Text without boundaries is tokenised at its end, not earlier: %s: %s"
                logger.warning(message, type(error).__name__, error)
            self._has_failed = True
            return None

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def encode_between(self, text: str, start: int, end: int) -> list[int]:
        """Return the tokens of ``text[start:end]`` in ``text``; ``start`` is 0 or a boundary."""
        if start == 0:
            return self.encode(text[:end])
        # Some tokenizers treat the start of a text specially. The anchor is enough context, because
        # the tokenizer splits after the anchor whatever text is before it.
        anchor = self.boundaries.anchor(text, start)
        return self.encode(anchor + text[start:end])[len(self.encode(anchor)) :]

    def encode_from(self, text: str, start: int, most: int | None = None) -> list[int]:
        """Return the tokens of ``text[start:]`` in ``text``; ``start`` is 0 or a boundary.

        Args: most: if there are more tokens than this, only the first of them are returned.
        """
        if start == 0 and len(text) > self.boundaries.longest:
            return self.encode(text)
        tokens: list[int] = []
        for end in stretches(start, len(text)):
            boundary = self.boundaries.last(text, start, end) if end < len(text) else end
            if boundary > start:
                tokens += self.encode_between(text, start, boundary)
                start = boundary
            if most is not None and len(tokens) > most:
                break
        return tokens

    @cached_property
    def digest(self) -> str | None:
        """Return a hash of vocabulary and rules, equal for engines that tokenise alike.

        Return ``None`` if the tokenizer shows neither.
        """
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        try:
            if backend is not None:
                rules = backend.to_str()
            else:
                rules = json.dumps(sorted(_vocabulary_of(self._tokenizer).items()))
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
    """A growing text, and its known tokens.

    Args:
        tokenizer: the tokenizer, which all buffers of a server share.
        add_special_tokens: whether the tokenizer adds its special tokens to the text, as to a plain
            ``text`` prompt. A rendered chat already has its special tokens.
        head: separately encoded text before the buffer's text. If the model continues an answer,
            the head is the rendered chat, and the buffer has the answer.

    Attributes:
        tokens: the tokens of the head and of the text. The first :attr:`certain_tokens` tokens are
            final. Later tokens are likely, and the buffer may take them back.
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
        # The ends of the tokens that are ahead of the last prefix.
        self._ahead: list[TokenizedPrefix] = []
        # Once the text has this length, more tokens are looked for ahead.
        self._look_at = 2 * _UNSETTLED_CHARACTERS

    @property
    def whole_text(self) -> str:
        """The text, with the head's text before it."""
        return self._head.text + self.text if self._head is not None else self.text

    @property
    def certain_tokens(self) -> int:
        """Number of the first ``tokens`` that no later text can change."""
        return self._prefixes[-1].tokens

    def append(self, text: str, most: int | None = None) -> int:
        """Add text, and the tokens that are known now.

        Args: most: the text is not tokenised to its end if there are more tokens than this.

        Return how many tokens are still the same as before. Later tokens were taken back.
        """
        kept, start = len(self.tokens), len(self.text)
        self.text += text
        for end in stretches(start, len(self.text)):
            kept = min(kept, self._tokenize(end))
            if most is not None and len(self.tokens) > most:
                break
        return kept

    def replace(self, start: int, text: str, most: int | None = None) -> int:
        """Put a text in the place of all text from ``start`` on; see :meth:`append`.

        Only text after the last boundary before the first change is tokenised again.
        """
        shared = start + common_length(self.text[start:], text)
        if shared == len(self.text):
            return self.append(text[shared - start :], most)
        before = self.tokens[:]
        prefix = self._shared_prefix(self.text[:start] + text)
        self.restore((shared, self._prefixes.index(prefix) + 1))
        self._searched = prefix.chars
        self.append(text[shared - start :], most)
        return common_length(before, self.tokens)

    def _tokenize(self, end: int) -> int:
        """Tokenise as much of ``text[:end]`` as is settled.

        Return how many tokens are still the same as before.
        """
        kept = len(self.tokens)
        start = self._prefixes[-1].chars
        # Some languages have no boundaries for long, and are not searched again and again.
        search_from = max(start, self._searched)
        boundary = self._tokenizer.boundaries.last(self.text, search_from, end)
        # Later text decides whether the last characters are at a boundary.
        self._searched = end - RIGHT_CONTEXT
        if boundary > search_from:
            new = array("q", self._tokenizer.encode_between(self.text, start, boundary))
            kept = self.certain_tokens + common_length(new, self.tokens[self.certain_tokens :])
            self._take_back(self.certain_tokens)
            self.tokens.extend(new)
            self._prefixes.append(TokenizedPrefix(boundary, len(self.tokens)))
            self._look_after(self._prefixes[-1])
        if end >= self._look_at:
            kept = min(kept, self._tokenize_ahead(end))
        return kept

    def _look_after(self, prefix: TokenizedPrefix) -> None:
        self._look_at = prefix.chars + 2 * _UNSETTLED_CHARACTERS

    def _tokenize_ahead(self, end: int) -> int:
        """Add tokens of ``text[:end]`` after the last boundary that are likely to stay.

        Return how many tokens are still the same as before.
        """
        last = self._ahead[-1] if self._ahead else self._prefixes[-1]
        places = [self._prefixes[-1], *self._ahead[-2 * _WINDOW_TOKENS :]]
        at = bisect_right(places, last.tokens - _WINDOW_TOKENS, key=lambda place: place.tokens)
        # If a tokenizer groups digits by three, only every third place begins such a window.
        windows = places[max(at - 3, 0) : max(at, 1)]
        for window in reversed(windows):
            encoded = self._tokenizer.encode_window(
                self.text, window.chars, end, window == self._prefixes[-1]
            )
            if encoded is None:
                self._look_at = sys.maxsize
                return len(self.tokens)
            repeated = self._repeated(encoded, window, last)
            if repeated is not None:
                break
        else:
            # More text may settle what these windows cannot.
            self._look_at = end + max(2 * _UNSETTLED_CHARACTERS, end - last.chars)
            self._take_back(windows[0].tokens)
            return windows[0].tokens
        count, settled = len(self.tokens), end - _UNSETTLED_CHARACTERS
        new = [
            number for number in range(repeated, len(encoded)) if 0 <= encoded[number][1] <= settled
        ]
        # A token that does not end is looked at again only after the text has doubled.
        self._look_at = end + (_UNSETTLED_CHARACTERS if new else end - last.chars)
        if new:
            self.tokens.extend(token for token, _ in encoded[repeated : new[-1] + 1])
            first = last.tokens + 1 - repeated
            self._ahead += [TokenizedPrefix(encoded[number][1], first + number) for number in new]
        return count

    def _repeated(
        self, encoded: list[tuple[int, int]], window: TokenizedPrefix, last: TokenizedPrefix
    ) -> int | None:
        """Return how many tokens of a window the buffer has; ``None`` if the tokens differ."""
        if window == last:
            return 0
        places = [number for number, (_, end) in enumerate(encoded) if end == last.chars]
        if not places:
            return None
        repeated = places[0] + 1
        compared = max(0, min(repeated, last.tokens - window.tokens) - _WINDOW_TOKENS // 4)
        again = [token for token, _ in encoded[max(0, repeated - compared) : repeated]]
        is_same = again == list(self.tokens[last.tokens - len(again) : last.tokens])
        return repeated if is_same else None

    def _take_back(self, tokens: int) -> None:
        """Drop the tokens that are ahead of the last boundary, down to a number of tokens."""
        del self.tokens[tokens:]
        while self._ahead and self._ahead[-1].tokens > tokens:
            self._ahead.pop()

    def snapshot(self) -> TokenBuffer:
        """Return a buffer of the same text, which another thread may read while this one grows."""
        same = copy(self)
        same.tokens = self.tokens[:]
        same._prefixes, same._ahead = self._prefixes[:], self._ahead[:]
        return same

    def unsettled_characters(self, place: int) -> int:
        """Return how many characters there are between a place and the last boundary before it."""
        return place - self._prefix_before(place).chars

    def checkpoint(self) -> tuple[int, int]:
        """Return a state that can be restored."""
        return len(self.text), len(self._prefixes)

    def restore(self, state: tuple[int, int]) -> None:
        """Undo every append since ``state`` was taken, and take back uncertain tokens."""
        chars, prefixes = state
        self.text = self.text[:chars]
        del self._prefixes[prefixes:]
        self._take_back(self.certain_tokens)
        self._searched = min(self._searched, len(self.text) - RIGHT_CONTEXT)
        self._look_after(self._prefixes[-1])

    def all_tokens(self, more: str = "", most: int | None = None) -> list[int]:
        """Return the tokens of the text as if it ended here, or after some more text.

        Args: most: if there are more tokens than this, only the first of them are returned.
        """
        tokens = self.encode(self.text + more, self.add_special_tokens, most)
        skipped = len(self._tokenizer.prefix) if self.add_special_tokens else 0
        return self._lead + tokens[skipped:]

    def encode_piece(self, text: str, add_special_tokens: bool, first: bool) -> list[int]:
        """Return the tokens of a piece of a prompt.

        Args: first: whether this is the first piece, or the only one.
        """
        if self._head is None or not first:
            return self.encode(text, add_special_tokens)
        if (text, add_special_tokens) == (self._head.text, self._head.add_special_tokens):
            return list(self._head.tokens)
        return self._tokenizer.encode(text, add_special_tokens)

    def encode(self, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """Return a text's tokens, tokenising only the part that this buffer has not tokenised yet.

        If ``text`` departs from the buffered text, the tokens up to the last boundary before the
        departure are reused.

        Args: most: if there are more tokens than this, only the first of them are returned.
        """
        tokenizer = self._tokenizer
        has_special = bool(tokenizer.prefix or tokenizer.suffix)
        is_other = add_special_tokens != self.add_special_tokens and has_special
        is_long = len(text) > tokenizer.boundaries.longest
        if is_other or is_long or not tokenizer.boundaries:
            return tokenizer.encode(text, add_special_tokens)
        prefix = self._shared_prefix(text)
        ids = list(tokenizer.prefix) if add_special_tokens else []
        ids += self.tokens[len(self._lead) : prefix.tokens]
        room = None if most is None else max(most - len(ids), 0)
        ids += tokenizer.encode_from(text, prefix.chars, room)
        return ids + tokenizer.suffix if add_special_tokens else ids

    def _shared_prefix(self, text: str) -> TokenizedPrefix:
        prefix = self._prefix_before(common_length(text, self.text))
        # The new text must have a boundary at the same place, with both of its sides.
        while prefix.chars and not self._tokenizer.boundaries.holds_at(text, prefix.chars):
            prefix = self._prefix_before(prefix.chars - 1)
        return prefix

    def _prefix_before(self, place: int) -> TokenizedPrefix:
        index = bisect_right(self._prefixes, place, key=lambda prefix: prefix.chars) - 1
        return self._prefixes[index]


def stretches(start: int, end: int) -> list[int]:
    """Return the ends of the stretches of a long text, which are tokenised one by one."""
    return [*range(start + LONG_TEXT, end, LONG_TEXT), end]


async def tokenize_aside(characters: int, work: Callable[[], T]) -> T:
    """Tokenise a text of some length; a long one in a thread, so that other requests go on."""
    return work() if characters <= LONG_TEXT else await asyncio.to_thread(work)


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


def _vocabulary_of(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the vocabulary's entries by their text; some tokenizers have bytes."""
    return {
        token.decode(errors="replace") if isinstance(token, bytes) else token: index
        for token, index in tokenizer.get_vocab().items()
    }
