"""Score given answers instead of decoding one (MoE-Prefill §2, §3)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import anyio

from flashmoa.engine import EngineClient, PluginMissing
from flashmoa.scoring.candidates import (
    Candidate,
    CandidateRefused,
    CandidateTokenizer,
    Context,
    answer_candidate,
    choice_question,
    option_letters,
    question_item,
    with_question,
)
from flashmoa.scoring.prefills import Prefills
from flashmoa.scoring.routes import PromptScores, ask_ranking, ask_scores
from flashmoa.scoring.scores import PrefillUsage, Ranking, Scores, Selection

logger = logging.getLogger(__name__)

ONE_LETTER = "Answer with the letter of one option."
YES_OR_NO = "Does this apply? Answer Yes or No."


class Scorer:
    """Asks an SGLang engine, with the plugin or without, how likely given answers are.

    Every score comes from prefills; no token is decoded. With the plugin, a call is one request
    (``/v1/score``), and what its prefills share is computed once (the intra-turn cache). Without
    it, each prefill is a request, and those that share a prefix wait for the first of them.

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
        self._prefills = Prefills(engine, template_args, self._limit)
        self._looked = self._has_route = False
        self._shares = True
        self._looking = anyio.Lock()

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
        (answer,) = await self._ask(context, None, candidates, prompt_stream_id)
        names = [text if isinstance(text, str) else str(list(text)) for text in candidates]
        lengths = [len(tokens) for tokens in answer.tokens] if length_normalised else None
        return Scores.of(names, answer.logprobs, lengths, answer.usage)

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
        (answer,) = await self._ask(context, None, list(named.values()), prompt_stream_id)
        for label, tokens in zip(named, answer.tokens, strict=True):
            if len(tokens) > 1:
                pieces = [await self._tokenizer.detokenize([token]) for token in tokens]
                raise CandidateRefused(
                    f"the label {label!r} has {len(tokens)} tokens after this context, {pieces}; "
                    f"give it a candidate of one token, as in {{{label!r}: {pieces[0]!r}}}, or use "
                    "score()"
                )
        return Scores.of(list(named), answer.logprobs, None, answer.usage)

    async def choose(
        self, context: Context, options: Sequence[str], *, instruction: str = ONE_LETTER
    ) -> Scores:
        """Return which option the model chooses when they are lettered A, B, ... (at most 26).

        The options and the instruction are added after the context, a text or messages.
        """
        question = choice_question(options, instruction)
        letters = [answer_candidate(context, letter) for letter in option_letters(len(options))]
        (answer,) = await self._ask(context, [question], letters)
        return Scores.of(options, answer.logprobs, None, answer.usage)

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

        questions = [f"{option}\n{instruction}" for option in options]
        scores = [
            Scores.of(answers, answer.logprobs, None, answer.usage)
            for answer in await self._ask(context, questions, candidates)
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
        """Rank documents by how likely they are relevant to a query; needs the plugin.

        Args:
            top_n: how many of the best documents to return; by default all.
            instruct: what relevance means, instead of the plugin's own sentence.

        Raises: PluginMissing if the engine runs without the plugin.
        """
        if not documents:
            raise ValueError("give at least one document")
        fields = {"top_n": top_n, "instruct": instruct}
        async with self._limit:
            return await ask_ranking(
                self._engine,
                query,
                documents,
                chat_template_kwargs=self.template_args or None,
                **fields,
            )

    async def _ask(
        self,
        context: Context,
        questions: Sequence[str] | None,
        candidates: Sequence[Candidate],
        stream: str | None = None,
    ) -> list[PromptScores]:
        """Score candidates after the context with each question, or after the context alone."""
        if not candidates:
            raise ValueError("give at least one candidate")
        await self._look_at_engine()
        items = questions and [question_item(context, question) for question in questions]
        # The request for a single prefill can use a prompt stream; a list cannot.
        if self._has_route and stream is None:
            async with self._limit:
                return await ask_scores(
                    self._engine, context, items, candidates, self.template_args
                )
        contexts = [with_question(context, question) for question in questions or ()] or [context]
        return await self._prefills.ask_scores(
            contexts, candidates, shares=self._shares, stream=stream
        )

    async def _look_at_engine(self) -> None:
        """Ask the engine once whether it has the scoring routes, and whether it shares prefixes.

        Sharing also counts as True if the engine keeps no KV, since waiting for the first request
        would not help.
        """
        async with self._looking:
            if self._looked:
                return
            problem = ""
            try:
                info = await self._engine.info()
                self._has_route = "scoring" in info.capabilities
                if any(rank.shares is False for rank in info.kv):
                    problem = f"{self._engine.url} does not share prefixes before they are computed"
            except PluginMissing as error:
                problem = str(error).removesuffix(".")
            self._looked, self._shares = True, not problem
            if problem:
                message = "%s. Of requests with one prefix, others wait for the first."
                logger.warning(message, problem)
