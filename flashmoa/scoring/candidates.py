"""Add questions to contexts (``with_question``); tokenise candidates (``CandidateTokenizer``)."""

from __future__ import annotations

import reprlib
import string
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, cast

from flashmoa.engine import EngineClient, RequestRefused
from flashmoa.errors import FlashMoAError

Messages = Sequence[Mapping[str, Any]]
# A text, token ids, or messages in OpenAI's format.
Context = str | Sequence[int] | Messages
# A text that continues where the context ends, or the tokens themselves.
Candidate = str | Sequence[int]

# How many of the context's last tokens are tokenised together with a candidate. As a rule only the
# last word matters, and the first number suffices. The second is tried if the tokenizer does not
# make these last tokens of their text.
_TAIL_LENGTHS = (16, 256)
# Number of tokens before a candidate that must be those that the tokenizer makes of the tail's
# text.
_MATCHING_TOKENS = 4
_CACHE_SIZE = 4096
# SGLang's status for tokens that its tokenizer has no text for.
_SERVER_ERROR = 500
_LETTERS = string.ascii_uppercase


class CandidateRefused(FlashMoAError, ValueError):
    """Raised when a candidate cannot be scored after its context; the message says what to do."""


def context_kind(context: Context) -> str:
    """Return ``text``, ``tokens`` or ``messages``. Raises: ValueError for anything else."""
    if isinstance(context, str):
        return "text"
    items = list(cast("Sequence[object]", context))
    if items and all(isinstance(item, Mapping) for item in items):
        return "messages"
    if items and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return "tokens"
    raise ValueError(
        "a context is a text, or a list of messages or of token ids that is not empty, not "
        f"{reprlib.repr(context)}"
    )


def with_question(context: Context, question: str) -> Context:
    """Return the context with a question added to the user's last message, or to the text.

    A text then ends with ``Answer:``. Raises: ValueError if the context is token ids, as only the
    engine could add a text to them.
    """
    item = question_item(context, question)
    if isinstance(context, str):
        return context + item
    *before, last = cast("Messages", context)
    if last.get("role") != "user":
        return [*before, last, {"role": "user", "content": item}]
    content: Any = last.get("content")
    if isinstance(content, list):
        content = [*cast("list[object]", content), {"type": "text", "text": item}]
    else:
        content = f"{content or ''}{item}"
    return [*before, {**last, "content": content}]


def question_item(context: Context, question: str) -> str:
    """Return the text that adds a question to a context. Raises: as :func:`with_question`."""
    kind = context_kind(context)
    if kind == "tokens":
        raise ValueError(
            "a question cannot follow token ids; give a text or messages, or use score()"
        )
    if kind == "text":
        return f"\n\n{question}\nAnswer:"
    last = cast("Messages", context)[-1]
    is_continued = last.get("role") == "user" and last.get("content")
    return f"\n\n{question}" if is_continued else question


def answer_candidate(context: Context, text: str) -> str:
    """Return an answer as a candidate after :func:`with_question`: with a space after a text."""
    return f" {text}" if isinstance(context, str) else text


def option_letters(count: int) -> list[str]:
    """Return a letter for each option. Raises: ValueError if there are too many or no options."""
    if not 1 <= count <= len(_LETTERS):
        raise ValueError(
            f"there are letters for 1 to {len(_LETTERS)} options, not for {count}; give fewer "
            "options, ask about each with select(), or score their texts with score()"
        )
    return list(_LETTERS[:count])


def choice_question(options: Sequence[str], instruction: str) -> str:
    """Return a question with lettered options. Raises: as :func:`option_letters`."""
    lettered = zip(option_letters(len(options)), options, strict=True)
    return "\n".join([*(f"{letter}. {option}" for letter, option in lettered), instruction])


class CandidateTokenizer:
    """Tokenises candidates as the engine's tokenizer does after their contexts.

    A candidate's tokens are those that the tokenizer makes of it *after the context*, because it
    may write a word differently at the beginning of a text. Only the context's end matters, so
    that the tokens are cached by it.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        # The tokens of a candidate by the context's end and the candidate's text.
        self._cache: OrderedDict[tuple[tuple[int, ...], str], list[int]] = OrderedDict()

    async def tokenize(
        self, context: Sequence[int], candidates: Sequence[Candidate]
    ) -> list[list[int]]:
        """Return the tokens of each candidate.

        Raises:
            CandidateRefused: if a candidate has no tokens, or cannot follow the context.
            EngineError: if the engine cannot answer.
        """
        end = tuple(context[-_TAIL_LENGTHS[0] :])
        texts = [candidate for candidate in candidates if isinstance(candidate, str)]
        by_text = {text: self._cache.get((end, text)) for text in texts}
        missing = [text for text, tokens in by_text.items() if tokens is None]
        if missing:
            for text, tokens in zip(missing, await self._tokenize(context, missing), strict=True):
                by_text[text] = self._cache[end, text] = tokens
            while len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        results: list[list[int]] = []
        for candidate in candidates:
            tokens = by_text[candidate] if isinstance(candidate, str) else list(candidate)
            if not tokens:
                raise CandidateRefused(f"the candidate {candidate!r} has no tokens; leave it out")
            results.append(tokens)
        return results

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens.

        Raises:
            CandidateRefused: if they have none.
            EngineError: if the engine cannot answer.
        """
        try:
            return await self._engine.detokenize(tokens)
        except RequestRefused as problem:
            if problem.status != _SERVER_ERROR:
                raise
            raise CandidateRefused(
                "the engine's tokenizer has no text for some of these tokens; use tokens of its "
                f"model: {problem}"
            ) from problem

    async def _tokenize(self, context: Sequence[int], texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text after the context.

        Try longer and longer ends of the context, until the tokenizer makes the context's last
        tokens of such an end's text.
        """
        for length in (*_TAIL_LENGTHS, len(context)):
            tail = list(context[-length:])
            tail_text = await self.detokenize(tail)
            before, *wholes = await self._engine.tokenize(
                [tail_text, *(tail_text + text for text in texts)], add_special_tokens=False
            )
            # The tail's first tokens may differ, since the text before them is missing.
            matching = max(1, min(_MATCHING_TOKENS, len(tail) - 2))
            if before[-matching:] == tail[-matching:]:
                pairs = zip(texts, wholes, strict=True)
                return [await self._cut_candidate(text, before, whole) for text, whole in pairs]
            if length >= len(context):
                break
        raise CandidateRefused(
            f"the context's last tokens {list(context[-_MATCHING_TOKENS:])} are not those that the "
            "tokenizer makes of their text; give candidates as token ids"
        )

    async def _cut_candidate(
        self, text: str, before: Sequence[int], whole: Sequence[int]
    ) -> list[int]:
        """Return the tokens of ``whole`` after those of the context's end, ``before``."""
        if list(whole[: len(before)]) == list(before):
            return list(whole[len(before) :])
        pairs = enumerate(zip(before, whole, strict=False))
        first_different = next((index for index, (a, b) in pairs if a != b), len(whole))
        joined = await self.detokenize(whole[first_different:])
        raise CandidateRefused(
            f"the candidate {text!r} is tokenised together with the context's end, as {joined!r}, "
            "so it cannot follow this context. Move white space from the context's end to the "
            "candidate's beginning, end the context at the end of a word, or give token ids"
        )
