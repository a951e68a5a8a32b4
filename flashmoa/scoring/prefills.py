"""Score candidates by requests for single prefills, which any SGLang server answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import anyio

from flashmoa._concurrency import all_of
from flashmoa.engine import EngineClient, NextLogprobs, PromptUsage
from flashmoa.scoring.candidates import (
    Candidate,
    CandidateRefused,
    CandidateTokenizer,
    Context,
    Messages,
    context_kind,
)
from flashmoa.scoring.routes import PromptScores
from flashmoa.scoring.scores import PrefillUsage

T = TypeVar("T")


class Prefills:
    """Scores candidates with one request for each prefill.

    Args:
        template_args: arguments of the chat template.
        limit: taken by each request.
    """

    def __init__(
        self,
        engine: EngineClient,
        template_args: Mapping[str, Any] | None,
        limit: anyio.Semaphore,
    ) -> None:
        self._engine = engine
        self._template_args = template_args
        self._limit = limit
        self._tokenizer = CandidateTokenizer(engine)

    async def ask_scores(
        self,
        contexts: Sequence[Context],
        candidates: Sequence[Candidate],
        *,
        shares: bool,
        stream: str | None = None,
    ) -> list[PromptScores]:
        """Score candidates after each context.

        Args:
            shares: whether the engine computes a prefix once that requests share which come at
                once. Otherwise the others wait for the first.
            stream: the id of a prompt stream with the first context.

        Raises: CandidateRefused if a candidate cannot follow a context; EngineError if the engine
            cannot answer.
        """
        calls = [partial(self._ask, context, candidates, shares, stream) for context in contexts]
        return await run_siblings(calls, shares)

    async def _ask(
        self,
        context: Context,
        candidates: Sequence[Candidate],
        shares: bool,
        stream: str | None,
    ) -> PromptScores:
        prompt, all_tokens = await self._tokenize(context, candidates)
        usage: list[PromptUsage] = []
        single = [tokens[0] for tokens in all_tokens if len(tokens) == 1]
        logprobs: dict[tuple[int, ...], float] = {}

        async def score_single() -> None:
            answer = await self._prefill(prompt, single, stream=stream)
            usage.append(answer.usage)
            for token, logprob in zip(single, answer.tokens, strict=True):
                logprobs[(token,)] = logprob

        async def score_long(tokens: Sequence[int], stream: str | None) -> None:
            answer = await self._prefill(prompt, continuation=tokens, stream=stream)
            usage.append(answer.usage)
            logprobs[tuple(tokens)] = sum(answer.continuation)

        # Only one request can use a stream: the one for single tokens, or else the first.
        several = [tokens for tokens in all_tokens if len(tokens) > 1]
        streams = [None if single else stream, *[None] * len(several)]
        longer = [partial(score_long, *pair) for pair in zip(several, streams, strict=False)]
        await run_siblings([score_single, *longer] if single else longer, shares)
        found = [logprobs[tuple(tokens)] for tokens in all_tokens]
        return PromptScores(all_tokens, found, PrefillUsage.of(usage))

    async def _tokenize(
        self, context: Context, candidates: Sequence[Candidate]
    ) -> tuple[list[int], list[list[int]]]:
        """Return the tokens of a context, and of each candidate after it."""
        async with self._limit:
            prompt = await self._tokenize_context(context)
            tokens = await self._tokenizer.tokenize(prompt, candidates)
        counts = Counter(map(tuple, tokens))
        if len(counts) < len(tokens):
            pairs = zip(candidates, tokens, strict=True)
            same = [candidate for candidate, own in pairs if counts[tuple(own)] > 1]
            raise CandidateRefused(
                f"two candidates are the same tokens, among {same}; give each once"
            )
        return prompt, tokens

    async def _tokenize_context(self, context: Context) -> list[int]:
        kind = context_kind(context)
        if kind == "tokens":
            return list(cast("Sequence[int]", context))
        if kind == "messages":
            messages = cast("Messages", context)
            return await self._engine.tokenize_chat(messages, template_args=self._template_args)
        (tokens,) = await self._engine.tokenize([str(context)])
        if not tokens:
            raise ValueError("the context is empty; give a text that candidates can follow")
        return tokens

    async def _prefill(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int] = (),
        *,
        continuation: Sequence[int] = (),
        stream: str | None = None,
    ) -> NextLogprobs:
        async with self._limit:
            return await self._engine.next_logprobs(
                prompt, tokens, continuation=continuation, prompt_stream_id=stream
            )


async def run_siblings(calls: Sequence[Callable[[], Awaitable[T]]], shares: bool) -> list[T]:
    """Send requests that share a prefix so that the engine computes it once."""
    if len(calls) > 1 and not shares:
        return [await calls[0](), *await all_of(calls[1:])]
    return await all_of(calls)
