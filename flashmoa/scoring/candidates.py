"""Contexts, questions after them, and the tokens of candidates that follow them."""

from __future__ import annotations

import string
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, cast

from flashmoa.engine import EngineClient, RequestRefused
from flashmoa.errors import FlashMoAError

Messages = Sequence[Mapping[str, Any]]
# A text, token ids, or messages in OpenAI's format.
Context = str | Sequence[int] | Messages
# A text that goes on where the context ends, or the tokens themselves.
Candidate = str | Sequence[int]

# How many of the context's last tokens are looked at. Only tokens of the last word are tokenised
# together with a candidate. The longer tail is for tokens that the tokenizer does not make of
# their own text.
_TAILS = (16, 256)
# This many tokens before a candidate must be what the tokenizer makes of the tail's text.
_MATCHING = 4
_MAX_REMEMBERED = 4096
# SGLang answers this for tokens that its tokenizer cannot show.
_SERVER_ERROR = 500
_LETTERS = string.ascii_uppercase


class CandidateRefused(FlashMoAError, ValueError):
    """Raised when a candidate cannot be scored after its context; the message says what to do."""


def context_kind(context: Context) -> str:
    """Return ``text``, ``tokens`` or ``messages``. Raises: ValueError for anything else."""
    if isinstance(context, str):
        return "text"
    items = list(cast("Sequence[object]", context))
    if items and all(isinstance(one, Mapping) for one in items):
        return "messages"
    if items and all(isinstance(one, int) and not isinstance(one, bool) for one in items):
        return "tokens"
    raise ValueError("a context is a text, or a list of messages or of token ids that is not empty")


def with_question(context: Context, question: str) -> Context:
    """Return the context with a question after it: in the user's last message, or after a text.

    A text then ends so that the answer follows. Raises: ValueError for token ids, to which only
    the engine could add a text.
    """
    kind = context_kind(context)
    if kind == "tokens":
        raise ValueError(
            "a question cannot follow token ids; give a text or messages, or use score()"
        )
    if kind == "text":
        return f"{context}\n\n{question}\nAnswer:"
    *before, last = cast("Messages", context)
    if last.get("role") != "user":
        return [*before, last, {"role": "user", "content": question}]
    return [*before, {**last, "content": _extended(last.get("content"), question)}]


def _extended(content: object, text: str) -> object:
    if isinstance(content, list):
        return [*cast("list[object]", content), {"type": "text", "text": f"\n\n{text}"}]
    return f"{content}\n\n{text}" if content else text


def answer_candidate(context: Context, text: str) -> str:
    """Return an answer in the form in which it follows :func:`with_question`."""
    return f" {text}" if isinstance(context, str) else text


def option_letters(count: int) -> list[str]:
    """Return a letter for each option. Raises: ValueError where there are too few letters."""
    if not 1 <= count <= len(_LETTERS):
        raise ValueError(
            f"there are letters for 1 to {len(_LETTERS)} options, not for {count}; ask about parts "
            "of them, about each with select(), or score their texts with score()"
        )
    return list(_LETTERS[:count])


def choice_question(options: Sequence[str], instruction: str) -> str:
    """Return a question with lettered options. Raises: ValueError where letters are too few."""
    named = zip(option_letters(len(options)), options, strict=True)
    return "\n".join([*(f"{letter}. {option}" for letter, option in named), instruction])


class CandidateTokenizer:
    """Tokenises candidates as the engine's tokenizer does after their contexts.

    A candidate's tokens are those that the tokenizer makes of it *after the context*, not on its
    own: a tokenizer may write a word differently at the beginning of a text. Only the context's end
    matters, so the tokens are remembered by that.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._known: OrderedDict[tuple[tuple[int, ...], str], list[int]] = OrderedDict()

    async def tokens(
        self, context: Sequence[int], candidates: Sequence[Candidate]
    ) -> list[list[int]]:
        """Return the tokens of each candidate. Raises: CandidateRefused; EngineError."""
        end = tuple(context[-_TAILS[0] :])
        texts = [one for one in candidates if isinstance(one, str)]
        found = {text: self._known.get((end, text)) for text in texts}
        missing = [text for text, tokens in found.items() if tokens is None]
        if missing:
            for text, tokens in zip(missing, await self._tokenize(context, missing), strict=True):
                found[text] = self._known[end, text] = tokens
            while len(self._known) > _MAX_REMEMBERED:
                self._known.popitem(last=False)
        tokens = [(found[one] or []) if isinstance(one, str) else list(one) for one in candidates]
        for one, its in zip(candidates, tokens, strict=True):
            if not its:
                raise CandidateRefused(f"the candidate {one!r} has no tokens; leave it out")
        return tokens

    async def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Raises: CandidateRefused if they have none; EngineError."""
        try:
            return await self._engine.detokenize(tokens)
        except RequestRefused as problem:
            if problem.status != _SERVER_ERROR:
                raise
            raise CandidateRefused(
                f"the engine has no text for some of these tokens: {problem}"
            ) from problem

    async def _tokenize(self, context: Sequence[int], texts: Sequence[str]) -> list[list[int]]:
        for length in (*_TAILS, len(context)):
            tail = list(context[-length:])
            shown = await self.text(tail)
            before, *after = await self._engine.tokenize(
                [shown, *(shown + text for text in texts)], add_special_tokens=False
            )
            # The tail's first tokens may come out differently without what was before them.
            matching = max(1, min(_MATCHING, len(tail) - 2))
            if before[-matching:] == tail[-matching:]:
                both = zip(texts, after, strict=True)
                return [await self._candidate_tokens(text, before, whole) for text, whole in both]
            if length >= len(context):
                break
        raise CandidateRefused(
            "the context's last tokens are not those that the tokenizer makes of their text; "
            "give candidates as token ids"
        )

    async def _candidate_tokens(
        self, text: str, before: Sequence[int], whole: Sequence[int]
    ) -> list[int]:
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
