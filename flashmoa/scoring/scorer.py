"""Score given answers instead of decoding one (MoE-Prefill §2, §3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anyio
from pydantic import BaseModel

from flashmoa.engine import EngineClient, StreamUse
from flashmoa.engine.client import Answer
from flashmoa.errors import (
    BadAnswer,
    EngineError,
    MalformedRequest,
    PluginMissing,
    RequestRefused,
)
from flashmoa.scoring.contexts import (
    Candidate,
    CandidateRefused,
    Context,
    answer_candidate,
    choice_question,
    context_kind,
    option_letters,
    question_item,
)
from flashmoa.scoring.label_scorer import LabelScorer
from flashmoa.scoring.scores import (
    ItemScores,
    PrefillUsage,
    RankedDocument,
    Ranking,
    Scores,
    Selection,
)

ONE_LETTER = "Answer with the letter of one option."
YES_OR_NO = "Does this apply? Answer Yes or No."
# The plugin's codes for refusals. Stock SGLang has none of these.
_REFUSED = "candidate_refused"
_OWN_CODES = (_REFUSED, "malformed", "too_large", "engine_busy", "draining")


class Scorer:
    """Asks an engine how likely given answers are.

    Every score comes from prefills; no token is decoded. With the plugin, a call is one request to
    the plugin's scoring routes (``docs/scoring.md``), and shared prefixes of its prompts are
    computed once. Other servers of SGLang and vLLM are asked by their own routes
    (:class:`~flashmoa.scoring.label_scorer.LabelScorer`).

    Args:
        template_args: arguments of the model's chat template, for contexts that are messages. For
            a model that would think before it answers, give ``{"enable_thinking": False}``.
        concurrency: the most requests at the same time.

    Its methods raise :class:`CandidateRefused` if a candidate cannot be scored after its context,
    ``ValueError`` for meaningless arguments, ``PluginMissing`` if the engine has no route for the
    scores, and the other exceptions of :class:`~flashmoa.engine.EngineClient`.
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
        # Set once the engine has turned out to lack the plugin's scoring routes.
        self._labels: LabelScorer | None = None

    async def score(
        self,
        context: Context,
        candidates: Sequence[Candidate],
        *,
        length_normalised: bool = False,
        prompt_stream_id: str | None = None,
    ) -> Scores:
        """Return how likely each candidate is to follow the context.

        One prefill scores all one-token candidates; each longer candidate has its own prefill.

        Args:
            candidates: texts that continue exactly where the context ends (``" yes"`` after
                ``Answer:``), or token ids.
            length_normalised: compare the mean log-probability per token of each candidate. The
                sums favour short candidates.
            prompt_stream_id: the id of a prompt stream with the context. Without the plugin, there
                are no streams.
        """
        (answer,) = await self._ask(context, None, candidates, prompt_stream_id)
        names = [text if isinstance(text, str) else str(list(text)) for text in candidates]
        lengths = [len(tokens) for tokens in answer.candidate_tokens]
        return answer.scores(names, lengths if length_normalised else None)

    async def classify(
        self,
        context: Context,
        labels: Sequence[str] | Mapping[str, Candidate],
        *,
        prompt_stream_id: str | None = None,
    ) -> Scores:
        """Score one-token labels, or a mapping from labels to candidates, by exactly one prefill.

        Raises: CandidateRefused, naming the tokens, if a label has several.
        """
        named = labels if isinstance(labels, Mapping) else {label: label for label in labels}
        if len(named) != len(labels):
            raise CandidateRefused(f"two of the labels {list(labels)} are the same; give each once")
        (answer,) = await self._ask(context, None, list(named.values()), prompt_stream_id)
        for label, tokens in zip(named, answer.candidate_tokens, strict=True):
            if len(tokens) > 1:
                pieces = [await self._engine.detokenize([token]) for token in tokens]
                raise CandidateRefused(
                    f"the label {label!r} has {len(tokens)} tokens after this context, {pieces}; "
                    f"give it a candidate of one token, as in {{{label!r}: {pieces[0]!r}}}, or use "
                    "score()"
                )
        return answer.scores(list(named))

    async def choose(
        self, context: Context, options: Sequence[str], *, instruction: str = ONE_LETTER
    ) -> Scores:
        """Return how likely the model chooses each option, lettered A, B, ... (at most 26).

        The options and the instruction follow the context, a text or messages.
        """
        question = choice_question(options, instruction)
        letters = [answer_candidate(context, letter) for letter in option_letters(len(options))]
        (answer,) = await self._ask(context, [question], letters)
        return answer.scores(options)

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
            threshold: the least probability of a yes for an option to be chosen.
        """
        if not options or not 0 <= threshold <= 1:
            raise ValueError(
                f"select() takes at least one option and a threshold in [0, 1], not {len(options)} "
                f"options and {threshold}"
            )
        candidates = [answer_candidate(context, answer) for answer in answers]

        questions = [f"{option}\n{instruction}" for option in options]
        scores = [
            answer.scores(answers) for answer in await self._ask(context, questions, candidates)
        ]
        likely = [answer.probabilities[0] for answer in scores]
        chosen = [option for option, yes in zip(options, likely, strict=True) if yes >= threshold]
        usage = sum((answer.usage for answer in scores), PrefillUsage())
        return Selection(list(options), likely, chosen, scores, usage)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruct: str | None = None,
    ) -> Ranking:
        """Rank documents by how likely they are relevant to a query; only with the plugin.

        Args:
            top_n: number of best documents to return; by default all.
            instruct: what relevance means, instead of the plugin's sentence.
        """
        if not documents:
            raise ValueError("give at least one document")
        body = {
            "query": query,
            "documents": list(documents),
            "top_n": top_n,
            "instruct": instruct,
            "chat_template_kwargs": self.template_args or None,
        }
        answer = await self._request("/v2/rerank", _RankAnswer, body)
        ranked = [
            RankedDocument(one.index, documents[one.index], one.relevance_score)
            for one in answer.results
        ]
        usage = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens
        return Ranking(ranked, PrefillUsage(usage.prefills, usage.prompt_tokens, cached))

    async def _ask(
        self,
        context: Context,
        questions: Sequence[str] | None,
        candidates: Sequence[Candidate],
        stream: str | None = None,
    ) -> list[ItemScores]:
        """Score candidates after the context with each question, or after the context alone."""
        if not candidates:
            raise ValueError("give at least one candidate")
        items = questions and [question_item(context, question) for question in questions]
        if self._labels is None:
            try:
                return await self._ask_plugin(context, items, candidates, stream)
            except PluginMissing:
                self._labels = await LabelScorer.connect(self._engine, self._limit)
                if self._labels is None:
                    raise
        return await self._labels.score(context, items, candidates, self.template_args)

    async def _ask_plugin(
        self,
        context: Context,
        items: Sequence[str] | None,
        candidates: Sequence[Candidate],
        stream: str | None,
    ) -> list[ItemScores]:
        body: dict[str, Any] = {
            "candidates": list(candidates),
            "items": items,
            "prompt_stream_id": stream,
        }
        if context_kind(context) == "messages":
            body |= {"messages": list(context), "chat_template_kwargs": self.template_args or None}
        else:
            body["query"] = context if isinstance(context, str) else list(context)
        try:
            answer = await self._request("/v1/score", _ScoreAnswer, body)
        except MalformedRequest as problem:
            if problem.code == _REFUSED:
                raise CandidateRefused(str(problem)) from problem
            raise
        about_stream = {
            "streamed_tokens": answer.usage.prompt_tokens_details.streamed_tokens,
            "prompt_stream": answer.usage.prompt_stream,
        }
        return [item.model_copy(update=about_stream) for item in answer.results]

    async def _request(self, path: str, kind: type[Answer], body: Mapping[str, Any]) -> Answer:
        """Send a request to one of the plugin's scoring routes.

        Raises: PluginMissing if the engine has no such routes, or only SGLang's with the same name.
        """
        engine = self._engine
        try:
            async with self._limit:
                return await engine.ask("POST", path, kind, {**engine.namespace, **body})
        except (PluginMissing, BadAnswer, RequestRefused) as error:
            if not await self._has_plugin(error):
                raise PluginMissing(
                    f"{engine.url} has no scoring routes of the flashmoa-sglang plugin; start it "
                    "with the plugin, and without --flashmoa-scoring off"
                ) from error
            raise

    async def _has_plugin(self, error: EngineError) -> bool:
        """Return whether an engine that answered with an error has the plugin's scoring routes."""
        if isinstance(error, RequestRefused) and error.code in _OWN_CODES:
            return True
        try:
            return "scoring" in (await self._engine.info()).capabilities
        except PluginMissing:
            return False


class _Details(BaseModel):
    cached_tokens: int = 0
    streamed_tokens: int | None = None


class _Usage(BaseModel):
    prefills: int
    prompt_tokens: int
    prompt_tokens_details: _Details
    prompt_stream: StreamUse | None = None


class _ScoreAnswer(BaseModel):
    results: list[ItemScores]
    usage: _Usage


class _Ranked(BaseModel):
    index: int
    relevance_score: float


class _RankAnswer(BaseModel):
    results: list[_Ranked]
    usage: _Usage
