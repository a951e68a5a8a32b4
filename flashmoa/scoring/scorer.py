"""Score given answers instead of decoding one (MoE-Prefill §2, §3)."""

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
    intra-turn cache). Without it, or if it does not share prefixes, the others wait for the first.

    Args:
        template_args: arguments of the model's chat template, for contexts that are messages. For
            a model that would think before it answers, give ``{"enable_thinking": False}``.
        concurrency: the most requests at the same time.

    Raises: its methods raise :class:`CandidateRefused` if a candidate cannot be scored after its
        context, ``ValueError`` for arguments that make no sense, and the exceptions of
        :class:`~flashmoa.engine.EngineClient`.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        template_args: Mapping[str, Any] | None = None,
        concurrency: int = 32,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        self.concurrency = concurrency
        self._engine = engine
        self.template_args = template_args
        self._limit = anyio.Semaphore(concurrency)
        self._tokenizer = CandidateTokenizer(engine)
        # Whether the engine computes a shared prefix once; None until it was asked.
        self._shares: bool | None = None
        self._shares_lock = anyio.Lock()

    async def score(
        self,
        context: Context,
        candidates: Sequence[Candidate],
        *,
        length_normalised: bool = False,
        prompt_stream_id: str | None = None,
    ) -> Scores:
        """Return how likely each candidate is to follow the context.

        One prefill scores all candidates of one token; each longer candidate has its own prefill.

        Args:
            candidates: texts that continue exactly where the context ends (``" yes"`` after
                ``Answer:``), or token ids.
            length_normalised: compare the means of candidates' log-probabilities by token, instead
                of their sums, which favour short candidates.
            prompt_stream_id: the id of a prompt stream with the context.
        """
        prompt, tokens = await self._tokenize(context, candidates)
        names = [text if isinstance(text, str) else str(list(text)) for text in candidates]
        return await self._compute_scores(
            names, prompt, tokens, length_normalised, prompt_stream_id
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
            labels: the candidates, or a mapping from names to candidates.

        Raises: CandidateRefused if a label has several tokens, which it names.
        """
        named = labels if isinstance(labels, Mapping) else {label: label for label in labels}
        if len(named) != len(labels):
            raise CandidateRefused(f"two of the labels {list(labels)} are the same; give each once")
        prompt, tokens = await self._tokenize(context, list(named.values()))
        for label, label_tokens in zip(named, tokens, strict=True):
            count = len(label_tokens)
            if count > 1:
                pieces = [await self._tokenizer.detokenize([token]) for token in label_tokens]
                raise CandidateRefused(
                    f"the label {label!r} has {count} tokens after this context, {pieces}; "
                    f"give it a candidate of one token, as in {{{label!r}: {pieces[0]!r}}}, or use "
                    "score()"
                )
        return await self._compute_scores(list(named), prompt, tokens, False, prompt_stream_id)

    async def choose(
        self, context: Context, options: Sequence[str], *, instruction: str = ONE_LETTER
    ) -> Scores:
        """Return which option the model chooses when they are lettered A, B, ... (at most 26).

        The options and the instruction are added after the context, a text or messages.
        """
        question = with_question(context, choice_question(options, instruction))
        answers = [answer_candidate(context, letter) for letter in option_letters(len(options))]
        prompt, tokens = await self._tokenize(question, answers)
        return await self._compute_scores(options, prompt, tokens, False, None)

    async def select(
        self,
        context: Context,
        options: Sequence[str],
        *,
        instruction: str = YES_OR_NO,
        answers: tuple[str, str] = ("Yes", "No"),
        threshold: float = 0.5,
    ) -> Selection:
        """Return which options apply, asking about each in a separate request.

        Args:
            answers: the words for and against an option.
            threshold: the least probability of a yes that an option is chosen with.
        """
        if not options or not 0 <= threshold <= 1:
            raise ValueError(
                f"select() takes at least one option and a threshold in [0, 1], not {len(options)} "
                f"options and {threshold}"
            )
        candidates = [answer_candidate(context, answer) for answer in answers]

        async def ask(option: str) -> Scores:
            question = with_question(context, f"{option}\n{instruction}")
            prompt, tokens = await self._tokenize(question, candidates)
            return await self._compute_scores(answers, prompt, tokens, False, None)

        scores = await self._run_siblings([partial(ask, option) for option in options])
        likely = [answer.probabilities[0] for answer in scores]
        chosen = [option for option, yes in zip(options, likely, strict=True) if yes >= threshold]
        usage = sum((answer.usage for answer in scores), PrefillUsage())
        return Selection(list(options), likely, chosen, scores, usage)

    async def _tokenize(
        self, context: Context, candidates: Sequence[Candidate]
    ) -> tuple[list[int], list[list[int]]]:
        """Return the tokens of a context, and of each candidate after it."""
        if not candidates:
            raise ValueError("give at least one candidate")
        async with self._limit:
            prompt = await self._tokenize_context(context)
            tokens = await self._tokenizer.tokenize(prompt, candidates)
        if len(set(map(tuple, tokens))) < len(tokens):
            same = [
                candidate
                for candidate, own in zip(candidates, tokens, strict=True)
                if tokens.count(own) > 1
            ]
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
            return await self._engine.tokenize_chat(messages, template_args=self.template_args)
        (tokens,) = await self._engine.tokenize([str(context)])
        if not tokens:
            raise ValueError("the context is empty; give a text that candidates can follow")
        return tokens

    async def _compute_scores(
        self,
        names: Sequence[str],
        prompt: Sequence[int],
        candidates: Sequence[Sequence[int]],
        length_normalised: bool,
        stream: str | None,
    ) -> Scores:
        usage: list[PromptUsage] = []
        single = [tokens[0] for tokens in candidates if len(tokens) == 1]
        logprobs: dict[tuple[int, ...], float] = {}

        async def score_single() -> None:
            answer = await self._prefill(prompt, single, stream=stream)
            usage.append(answer.usage)
            for token, logprob in zip(single, answer.tokens, strict=True):
                logprobs[(token,)] = logprob

        async def score_long(tokens: Sequence[int]) -> None:
            # Only one request can use a stream: the one for single tokens, unless there is none.
            answer = await self._prefill(
                prompt, continuation=tokens, stream=None if single else stream
            )
            usage.append(answer.usage)
            logprobs[tuple(tokens)] = sum(answer.continuation)

        longer = [partial(score_long, tokens) for tokens in candidates if len(tokens) > 1]
        await self._run_siblings([score_single, *longer] if single else longer)
        return Scores.of(
            names,
            [logprobs[tuple(tokens)] for tokens in candidates],
            [len(tokens) for tokens in candidates] if length_normalised else None,
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

    async def _run_siblings(self, calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
        """Send requests that share a prefix so that the engine computes it once."""
        if len(calls) > 1 and not await self._engine_shares():
            return [await calls[0](), *await all_of(calls[1:])]
        return await all_of(calls)

    async def _engine_shares(self) -> bool:
        """Return whether requests with one prefix can be sent at once without computing it twice.

        Also True if the engine keeps no KV, since waiting for the first request would not help.
        """
        async with self._shares_lock:
            if self._shares is None:
                problem = ""
                try:
                    ranks = (await self._engine.info()).kv
                    if any(rank.shares is False for rank in ranks):
                        url = self._engine.url
                        problem = f"{url} does not share prefixes before they are computed"
                except PluginMissing as error:
                    problem = str(error).removesuffix(".")
                self._shares = not problem
                if problem:
                    message = "%s. Of requests with one prefix, others wait for the first."
                    logger.warning(message, problem)
        return self._shares
