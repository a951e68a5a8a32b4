"""Ask the plugin's scoring routes, which answer a whole list at once (``docs/scoring.md``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from flashmoa.engine import EngineClient, MalformedRequest
from flashmoa.scoring.candidates import Candidate, CandidateRefused, Context, context_kind
from flashmoa.scoring.scores import PrefillUsage, RankedDocument, Ranking

# Clients recognise the plugin's error by this code.
_REFUSED = "candidate_refused"


class PromptScores(NamedTuple):
    """What a model answers to one prompt: the tokens of each candidate, and how likely they are."""

    tokens: list[list[int]]
    logprobs: list[float]
    usage: PrefillUsage


class _Item(BaseModel):
    logprobs: list[float | None]
    candidate_tokens: list[list[int]]
    prefills: int
    prompt_tokens: int
    computed_tokens: int

    def answer(self) -> PromptScores:
        cached = self.prompt_tokens - self.computed_tokens
        logprobs = [-math.inf if value is None else value for value in self.logprobs]
        usage = PrefillUsage(self.prefills, self.prompt_tokens, cached)
        return PromptScores(self.candidate_tokens, logprobs, usage)


class _Scored(BaseModel):
    results: list[_Item]


class _Ranked(BaseModel):
    index: int
    relevance_score: float


class _CachedTokens(BaseModel):
    cached_tokens: int


class _Usage(BaseModel):
    prefills: int
    prompt_tokens: int
    prompt_tokens_details: _CachedTokens


class _Reranked(BaseModel):
    results: list[_Ranked]
    usage: _Usage


async def ask_scores(
    engine: EngineClient,
    context: Context,
    items: Sequence[str] | None,
    candidates: Sequence[Candidate],
    template_args: Mapping[str, Any] | None,
) -> list[PromptScores]:
    """Score candidates after the context with each item, or after the context alone.

    Raises:
        CandidateRefused: if a candidate cannot follow a prompt.
        EngineError: if the engine cannot answer.
    """
    body: dict[str, Any] = {"candidates": list(candidates), "items": items}
    if context_kind(context) == "messages":
        body |= {"messages": list(context), "chat_template_kwargs": template_args or None}
    else:
        body["query"] = context if isinstance(context, str) else list(context)
    try:
        scored = await engine.ask("POST", "/v1/score", _Scored, body)
    except MalformedRequest as problem:
        if problem.code == _REFUSED:
            raise CandidateRefused(str(problem)) from problem
        raise
    return [item.answer() for item in scored.results]


async def ask_ranking(
    engine: EngineClient, query: str, documents: Sequence[str], **fields: Any
) -> Ranking:
    """Rank documents. Raises: EngineError if the engine cannot answer."""
    body = {"query": query, "documents": list(documents), **fields}
    answer = await engine.ask("POST", "/v2/rerank", _Reranked, body)
    usage = answer.usage
    cached = usage.prompt_tokens_details.cached_tokens
    return Ranking(
        [
            RankedDocument(one.index, documents[one.index], one.relevance_score)
            for one in answer.results
        ],
        PrefillUsage(usage.prefills, usage.prompt_tokens, cached),
    )
