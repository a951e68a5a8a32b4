"""Scoring answers that are given, instead of decoding one (MoE-Prefill §2, §3)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import anyio

from flashmoa._concurrency import all_of
from flashmoa.engine import EngineClient, NextLogprobs, PluginMissing, PromptUsage
from flashmoa.scoring.candidates import (
    Candidate,
    CandidateRefused,
    CandidateTokenizer,
    Context,
    Messages,
    answer_candidate,
    choice_question,
    context_kind,
    option_letters,
    with_question,
)
from flashmoa.scoring.scores import PrefillUsage, Scores, Selection

logger = logging.getLogger(__name__)

T = TypeVar("T")

ONE_LETTER = "Answer with the letter of one option."
YES_OR_NO = "Does this apply? Answer Yes or No."


class Scorer:
    """Asks an SGLang engine, with the plugin or without, how likely given answers are.

    Every score comes from prefills; no token is decoded. The requests of one call share their
    prefix. With the plugin they are sent at once and the engine computes the prefix once (the
    intra-turn cache); without it, or where it does not share, the others wait for the first.

    Args:
        template_args: of the model's chat template, for contexts that are messages; a model that
            thinks before it answers must be told not to (``{"enable_thinking": False}``).
        concurrency: the most requests under way at once.

    Its methods raise :class:`CandidateRefused`, ``ValueError`` for arguments that make no sense,
    and what :class:`~flashmoa.engine.EngineClient` raises.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        template_args: Mapping[str, Any] | None = None,
        concurrency: int = 32,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency {concurrency} is not at least 1")
        self._engine = engine
        self._template_args = template_args
        self._limit = anyio.Semaphore(concurrency)
        self._tokenizer = CandidateTokenizer(engine)
        self._shares: bool | None = None
        self._asking_sharing = anyio.Lock()

    async def score(
        self,
        context: Context,
        candidates: Sequence[Candidate],
        *,
        length_normalised: bool = False,
        prompt_stream_id: str | None = None,
    ) -> Scores:
        """Return how likely each candidate is to follow the context.

        Candidates of one token come from one prefill; each of several tokens is a sibling of it.

        Args:
            candidates: texts, as they go on where the context ends (after ``Answer:`` that is
                ``" yes"``), or token ids.
            length_normalised: probabilities by the mean of a candidate's log-probabilities and
                not by their sum, which favours short ones.
            prompt_stream_id: the id of a prompt stream with the context.
        """
        prompt, tokens = await self._prepared(context, candidates)
        return await self._scores(
            _names(candidates), prompt, tokens, length_normalised, prompt_stream_id
        )

    async def classify(
        self,
        context: Context,
        labels: Sequence[str] | Mapping[str, Candidate],
        *,
        prompt_stream_id: str | None = None,
    ) -> Scores:
        """Score labels of one token each, from exactly one prefill.

        Args:
            labels: the candidates, or names and the candidates that stand for them.

        Raises: CandidateRefused, which names the tokens of a label that has several.
        """
        named = labels if isinstance(labels, Mapping) else {label: label for label in labels}
        if len(named) != len(labels):
            raise CandidateRefused(f"two of the labels {list(labels)} are the same; give each once")
        prompt, tokens = await self._prepared(context, list(named.values()))
        for label, its in zip(named, tokens, strict=True):
            if len(its) > 1:
                pieces = [await self._tokenizer.text([token]) for token in its]
                raise CandidateRefused(
                    f"the label {label!r} has {len(its)} tokens after this context, {pieces}; name "
                    f"it by one token, as in {{{label!r}: {pieces[0]!r}}}, or use score()"
                )
        return await self._scores(list(named), prompt, tokens, False, prompt_stream_id)

    async def choose(
        self, context: Context, options: Sequence[str], *, instruction: str = ONE_LETTER
    ) -> Scores:
        """Return which option the model chooses when they are lettered A, B, ... (at most 26).

        The options and the instruction are added after the context, a text or messages.
        """
        question = with_question(context, choice_question(options, instruction))
        answers = [answer_candidate(context, letter) for letter in option_letters(len(options))]
        prompt, tokens = await self._prepared(question, answers)
        return await self._scores(options, prompt, tokens, False, None)

    async def select(
        self,
        context: Context,
        options: Sequence[str],
        *,
        instruction: str = YES_OR_NO,
        answers: tuple[str, str] = ("Yes", "No"),
        threshold: float = 0.5,
    ) -> Selection:
        """Return which options apply, asking about each by itself; the context is shared.

        Args:
            answers: the words for and against an option.
        """
        if not options or not 0 <= threshold <= 1:
            raise ValueError(
                f"select() takes at least one option and a threshold in [0, 1], not {len(options)} "
                f"options and {threshold}"
            )
        candidates = [answer_candidate(context, answer) for answer in answers]

        async def ask(option: str) -> Scores:
            question = with_question(context, f"{option}\n{instruction}")
            prompt, tokens = await self._prepared(question, candidates)
            return await self._scores(answers, prompt, tokens, False, None)

        each = await self._siblings([partial(ask, option) for option in options])
        likely = [one.probabilities[0] for one in each]
        chosen = [one for one, yes in zip(options, likely, strict=True) if yes >= threshold]
        usage = sum((one.usage for one in each), PrefillUsage())
        return Selection(list(options), likely, chosen, each, usage)

    async def _prepared(
        self, context: Context, candidates: Sequence[Candidate]
    ) -> tuple[list[int], list[list[int]]]:
        """Return the tokens of a context, and of each candidate after it."""
        if not candidates:
            raise ValueError("give at least one candidate")
        async with self._limit:
            prompt = await self._prompt(context)
            tokens = await self._tokenizer.tokens(prompt, candidates)
        if len({tuple(its) for its in tokens}) < len(tokens):
            raise CandidateRefused("two candidates are the same tokens; give each once")
        return prompt, tokens

    async def _prompt(self, context: Context) -> list[int]:
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

    async def _scores(
        self,
        names: Sequence[str],
        prompt: Sequence[int],
        tokens: Sequence[Sequence[int]],
        length_normalised: bool,
        stream: str | None,
    ) -> Scores:
        usage: list[PromptUsage] = []
        single = [its[0] for its in tokens if len(its) == 1]
        found: dict[tuple[int, ...], float] = {}

        async def score_single() -> None:
            answer = await self._prefill(prompt, single, stream=stream)
            usage.append(answer.usage)
            found.update({(one,): value for one, value in zip(single, answer.tokens, strict=True)})

        async def score_long(its: Sequence[int]) -> None:
            answer = await self._prefill(
                prompt, continuation=its, stream=None if single else stream
            )
            usage.append(answer.usage)
            found[tuple(its)] = sum(answer.continuation)

        longer = [partial(score_long, its) for its in tokens if len(its) > 1]
        await self._siblings([score_single, *longer] if single else longer)
        return Scores.of(
            names,
            [found[tuple(its)] for its in tokens],
            [len(its) for its in tokens] if length_normalised else None,
            PrefillUsage.of(usage),
        )

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

    async def _siblings(self, calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
        """Send requests that share a prefix so that the engine computes it once."""
        if len(calls) > 1 and not await self._engine_shares():
            return [await calls[0](), *await all_of(calls[1:])]
        return await all_of(calls)

    async def _engine_shares(self) -> bool:
        async with self._asking_sharing:
            if self._shares is None:
                problem = await self._why_not_shared()
                self._shares = problem is None
                if problem is not None:
                    message = "%s. Of requests with one prefix, others wait for the first."
                    logger.warning(message, problem)
        return self._shares

    async def _why_not_shared(self) -> str | None:
        """Return why the engine computes a shared prefix repeatedly; ``None`` if it does not.

        Also ``None`` where waiting for the first request would not help.
        """
        try:
            ranks = (await self._engine.info()).kv
        except PluginMissing as problem:
            return str(problem)
        if any(rank.shares is False for rank in ranks):
            return f"{self._engine.url} does not share prefixes before they are computed"
        return None


def _names(candidates: Sequence[Candidate]) -> list[str]:
    return [one if isinstance(one, str) else str(list(one)) for one in candidates]
