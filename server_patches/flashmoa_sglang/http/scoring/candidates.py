"""``CandidateTokenizer``: the tokens of answers, as the tokenizer writes them after a prompt."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flashmoa_sglang.http.errors import CandidateRefused

if TYPE_CHECKING:
    from flashmoa_sglang.http.token_buffer import CanonicalTokenizer

Candidate = str | list[int]

# How many of the prompt's last tokens are tokenised together with a candidate. As a rule only the
# last word matters, and the first number suffices. The second is tried if the tokenizer does not
# make these last tokens of their text.
_TAIL_LENGTHS = (16, 256)
# Number of tokens before a candidate that must be those that the tokenizer makes of the tail.
_MATCHING_TOKENS = 4
_CACHE_SIZE, _MOST_CACHED_CHARACTERS = 4096, 256


class CandidateTokenizer:
    """Tokenises candidates after the ends of prompts, on which alone their tokens depend.

    Args:
        tokenizer: returns the tokenizer, or refuses a candidate of text if there is none.
    """

    def __init__(self, tokenizer: Callable[[], CanonicalTokenizer]) -> None:
        self._tokenizer = tokenizer
        self._cache: OrderedDict[tuple[tuple[int, ...], str], list[int]] = OrderedDict()

    def tokenize(self, prompt: Sequence[int], candidate: Candidate) -> list[int]:
        """Return a candidate's tokens.

        Raises: CandidateRefused if it has none, or cannot follow the prompt.
        """
        tokens = candidate if isinstance(candidate, list) else self._cached(prompt, candidate)
        if not tokens:
            raise CandidateRefused(f"The candidate {candidate!r} has no tokens; leave it out.")
        return tokens

    def _cached(self, prompt: Sequence[int], text: str) -> list[int]:
        if len(text) > _MOST_CACHED_CHARACTERS:
            return self._after(prompt, text)
        key = (tuple(prompt[-_TAIL_LENGTHS[0] :]), text)
        if (tokens := self._cache.get(key)) is None:
            tokens = self._cache[key] = self._after(prompt, text)
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return tokens

    def _after(self, prompt: Sequence[int], text: str) -> list[int]:
        """Try longer and longer ends, until the tokenizer makes the end's tokens of its text."""
        tokenizer = self._tokenizer()
        for length in (*_TAIL_LENGTHS, len(prompt)):
            tail = list(prompt[-length:])
            tail_text = tokenizer.decode(tail)
            before = tokenizer.encode(tail_text)
            # The tail's first tokens may differ, since the text before them is missing.
            matching = max(1, min(_MATCHING_TOKENS, len(tail) - 2))
            if before[-matching:] == tail[-matching:]:
                return self._cut(text, before, tokenizer.encode(tail_text + text))
            if length >= len(prompt):
                break
        raise CandidateRefused(
            f"The prompt's last tokens {list(prompt[-_MATCHING_TOKENS:])} are not those that the "
            "tokenizer makes of their text; give candidates as token ids."
        )

    def _cut(self, text: str, before: list[int], whole: list[int]) -> list[int]:
        """Return the tokens of ``whole`` after those of the prompt's end, ``before``."""
        if whole[: len(before)] == before:
            return whole[len(before) :]
        pairs = enumerate(zip(before, whole, strict=False))
        first_different = next((index for index, (a, b) in pairs if a != b), len(whole))
        joined = self._tokenizer().decode(whole[first_different:])
        raise CandidateRefused(
            f"The candidate {text!r} is tokenised together with the context's end, as {joined!r}, "
            "so it cannot follow this context. Move white space from the context's end to the "
            "candidate's beginning, end the context at the end of a word, or give token ids."
        )


def refuse_duplicates(candidates: Sequence[Candidate], tokens: Sequence[list[int]]) -> None:
    """Raise CandidateRefused if two candidates are the same tokens."""
    counts = Counter(map(tuple, tokens))
    if len(counts) == len(tokens):
        return
    pairs = zip(candidates, tokens, strict=True)
    same = [candidate for candidate, own in pairs if counts[tuple(own)] > 1]
    raise CandidateRefused(
        f"At least two candidates are the same tokens, among {same}; give each once."
    )
