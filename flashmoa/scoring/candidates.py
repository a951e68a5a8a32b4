"""Which tokens a candidate is where it stands."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from flashmoa.engine import RequestRefused
from flashmoa.errors import FlashMoAError

# A text that goes on where the context ends, or the tokens themselves.
Candidate = str | Sequence[int]

# How many tokens of the context are looked at. What is tokenised with a candidate stands in its
# word; more are taken where these are not what the tokenizer makes of their text.
_TAILS = (16, 256)
# Of those, how many must be.
_SURE = 4
_REMEMBERED = 4096
# What SGLang answers for tokens that its tokenizer cannot show.
_SERVER_ERROR = 500


class CandidateRefused(FlashMoAError, ValueError):
    """Raised when a candidate cannot be scored after this context; says what to do about it."""


class Tokenizer(Protocol):
    """An :class:`~flashmoa.engine.EngineClient`, of which this is needed."""

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]: ...

    async def detokenize(self, token_ids: Sequence[int]) -> str: ...


class Border:
    """What follows contexts, by the engine's tokenizer.

    A text is what the tokenizer makes of it *after the context*, not by itself: a tokenizer
    may write a word differently at the beginning of a text. Only the context's end matters, so
    its tokens are remembered by that.
    """

    def __init__(self, engine: Tokenizer) -> None:
        self._engine = engine
        self._known: OrderedDict[tuple[tuple[int, ...], str], list[int]] = OrderedDict()

    async def tokens(
        self, context: Sequence[int], candidates: Sequence[Candidate]
    ) -> list[list[int]]:
        """The tokens of each candidate. Raises: CandidateRefused, EngineError."""
        end = tuple(context[-_TAILS[0] :])
        texts = [one for one in candidates if isinstance(one, str)]
        found = {text: self._known.get((end, text)) for text in texts}
        missing = [text for text, tokens in found.items() if tokens is None]
        if missing:
            for text, tokens in zip(missing, await self._ask(context, missing), strict=True):
                found[text] = self._known[end, text] = tokens
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        tokens = [(found[one] or []) if isinstance(one, str) else list(one) for one in candidates]
        for one, its in zip(candidates, tokens, strict=True):
            if not its:
                raise CandidateRefused(f"the candidate {one!r} has no tokens; leave it out")
        return tokens

    async def text(self, tokens: Sequence[int]) -> str:
        """Raises: CandidateRefused for tokens that have none, EngineError."""
        try:
            return await self._engine.detokenize(tokens)
        except RequestRefused as problem:
            if problem.status != _SERVER_ERROR:
                raise
            raise CandidateRefused(
                f"the engine has no text for some of these tokens: {problem}"
            ) from problem

    async def _ask(self, context: Sequence[int], texts: Sequence[str]) -> list[list[int]]:
        for length in (*_TAILS, len(context)):
            tail = list(context[-length:])
            shown = await self.text(tail)
            before, *after = await self._engine.tokenize(
                [shown, *(shown + text for text in texts)], add_special_tokens=False
            )
            # The first of them may have lost what they were written with.
            sure = max(1, min(_SURE, len(tail) - 2))
            if before[-sure:] == tail[-sure:]:
                both = zip(texts, after, strict=True)
                return [await self._rest(text, before, whole) for text, whole in both]
            if length >= len(context):
                break
        raise CandidateRefused(
            "the context's last tokens are not those that the tokenizer makes of their text; "
            "give candidates as token ids"
        )

    async def _rest(self, text: str, before: Sequence[int], whole: Sequence[int]) -> list[int]:
        if list(whole[: len(before)]) == list(before):
            return list(whole[len(before) :])
        pairs = enumerate(zip(before, whole, strict=False))
        same = next((at for at, (one, other) in pairs if one != other), len(whole))
        joined = await self.text(whole[same:])
        raise CandidateRefused(
            f"the candidate {text!r} is tokenised together with the context's end, as {joined!r}, "
            "so that it cannot follow it. Move white space from the context's end to the "
            "candidate's beginning, end the context at a word's end, or give token ids"
        )
