"""Computes the log-probabilities of answers after prompts, each by a prefill of its own.

The prefills of a list are sent together, so that the engine computes what they share once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.http.engine import new_rid
from flashmoa_sglang.http.errors import ApiError, EngineBusy, EngineFailed
from flashmoa_sglang.http.stream import Terms
from flashmoa_sglang.messages import unsent

if TYPE_CHECKING:
    from flashmoa_sglang.http.engine import Engine

# Enough to fill a forward with short prompts. The others of a long list stay in this process, so
# that other clients' requests need not queue behind all of them.
_PREFILLS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A prompt, and the tokens of the candidates that may follow it.

    ``name``: the item's name in messages, ``documents[3]``.
    """

    index: int
    name: str
    ids: list[int]
    candidates: list[list[int]]


@dataclass(slots=True)
class ScoringUsage:
    """Counts prefills, and the tokens of their prompts."""

    prefills: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, prefills: int, prompt_tokens: int, cached_tokens: int) -> None:
        self.prefills += prefills
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens


@dataclass(frozen=True, slots=True)
class ItemScores:
    """The natural logarithm of each candidate's probability after one prompt."""

    prompt: ScoredPrompt
    logprobs: list[float]
    usage: ScoringUsage


@contextmanager
def name_item(name: str, index: int) -> Generator[None]:
    """Name the item in the message of an :class:`ApiError`, and its index in ``item``."""
    try:
        yield
    except ApiError as error:
        details = {**error.details, "item": index}
        raise type(error)(f"{name}: {error}", **details) from error


@dataclass(slots=True)
class ListScorer:
    """Scores the prompts of one request.

    Attributes:
        shares: whether the engine computes a prefix once that requests share which come at once.
        on_scores: called with the scores of each prompt as soon as they are there.
        usage: of the prefills so far.
    """

    engine: Engine
    terms: Terms
    http_request: Any
    shares: bool
    on_scores: Callable[[ItemScores], None]
    usage: ScoringUsage = field(default_factory=ScoringUsage)

    async def run(self, prompts: Sequence[ScoredPrompt]) -> None:
        """Score all prompts.

        Raises: ApiError if the engine cannot compute one; the others are aborted.
        """
        queue = self.engine.max_queued_requests
        # A queue that one list fills would refuse the list's own prefills, and other clients'.
        at_once = _PREFILLS_AT_ONCE if queue is None else min(_PREFILLS_AT_ONCE, queue // 2)
        each = max(1, at_once // max(1, len(prompts)))
        scores = [partial(self._score, prompt, each) for prompt in prompts]
        await self._run_siblings(scores, max(1, at_once))

    async def _run_siblings(
        self, calls: Sequence[Callable[[], Coroutine[Any, Any, None]]], at_once: int
    ) -> None:
        """Send prefills that share a prefix so that the engine computes it once."""
        rest = iter(calls)

        async def work() -> None:
            for call in rest:
                await call()

        if calls and not self.shares:
            await next(rest)()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(at_once, len(calls))):
                    group.create_task(work())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _score(self, prompt: ScoredPrompt, at_once: int) -> None:
        logprobs: dict[tuple[int, ...], float] = {}
        usage = ScoringUsage()
        single = [tokens[0] for tokens in prompt.candidates if len(tokens) == 1]

        async def score_single() -> None:
            meta = await self._prefill(prompt.ids, usage, token_ids_logprob=single)
            values = {token: value for value, token, *_ in meta["output_token_ids_logprobs"][0]}
            logprobs.update({(token,): _to_float(values[token]) for token in single})

        async def score_long(tokens: list[int]) -> None:
            # SGLang gives log-probabilities only for the tokens after this position.
            start = len(prompt.ids) - 1
            meta = await self._prefill(prompt.ids, usage, tokens, logprob_start_len=start)
            values = [value for value, *_ in meta["input_token_logprobs"][1:]]
            logprobs[tuple(tokens)] = math.fsum(map(_to_float, values))

        longer = [partial(score_long, tokens) for tokens in prompt.candidates if len(tokens) > 1]
        with name_item(prompt.name, prompt.index):
            await self._run_siblings([score_single, *longer] if single else longer, at_once)
        scores = [logprobs[tuple(tokens)] for tokens in prompt.candidates]
        self.usage.add(usage.prefills, usage.prompt_tokens, usage.cached_tokens)
        self.on_scores(ItemScores(prompt, scores, usage))

    async def _prefill(
        self, ids: list[int], usage: ScoringUsage, tokens: Sequence[int] = (), **wanted: Any
    ) -> dict[str, Any]:
        """Run a prefill of ``ids`` and ``tokens`` for log-probabilities; return ``meta_info``."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            input_ids=[*ids, *tokens],
            # If another request of the batch decodes, SGLang applies each request's temperature to
            # its log-probabilities.
            sampling_params={"max_new_tokens": 0, "temperature": 1.0},
            return_logprob=True,
            rid=new_rid(),
            priority=self.terms.priority,
            **wanted,
            **self.terms.namespace(),
            **(unsent() if self.engine.role == "prefill" else {}),
        )
        meta = await self.engine.run(request, self.http_request)
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            refusal = EngineBusy if reason.get("status_code") == EngineBusy.status else EngineFailed
            raise refusal(f"SGLang has aborted this prefill: {reason.get('message', 'aborted')}")
        usage.add(1, meta["prompt_tokens"], meta["cached_tokens"])
        return meta


def _to_float(value: float | None) -> float:
    return -math.inf if value is None else value
