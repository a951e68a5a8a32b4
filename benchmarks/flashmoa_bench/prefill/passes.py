"""Prefill-only requests in bulk: as one generated token each, and as scores."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import anyio
import httpx

from flashmoa.engine import BadAnswer, EngineClient
from flashmoa.scoring import Scorer

_ONE_TOKEN = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, as token ids."""

    name: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request.

    Attributes:
        token: the likeliest first token. logprob: its natural logarithm, if it was told.
        seconds: from sending it to the answer.
    """

    token: int
    logprob: float | None
    prompt_tokens: int
    cached_tokens: int
    seconds: float = 0.0


Ask = Callable[[Request], Awaitable[Answer]]


class OneToken:
    """As SGLang is asked without FlashMoA: one greedy token.

    Args:
        http: with the same limits as an :class:`~flashmoa.engine.EngineClient` has: where it keeps
            many connections, looking through them takes longer than a small model's forwards.
        logprobs: ask for its log-probability, too.
    """

    def __init__(self, http: httpx.AsyncClient, url: str, *, logprobs: bool = False) -> None:
        self._http = http
        self._url = f"{url}/generate"
        self._more = {"return_logprob": True} if logprobs else {}

    async def __call__(self, request: Request) -> Answer:
        """Raises: BadAnswer for anything but a token."""
        body = {"input_ids": request.ids, "sampling_params": _ONE_TOKEN, **self._more}
        answer = await self._http.post(self._url, json=body)
        try:
            told = answer.raise_for_status().json()
            meta: Mapping[str, Any] = told["meta_info"]
            logprob = meta["output_token_logprobs"][0][0] if self._more else None
            prompt, cached = int(meta["prompt_tokens"]), int(meta["cached_tokens"])
            return Answer(int(told["output_ids"][0]), logprob, prompt, cached)
        except (httpx.HTTPStatusError, ValueError, LookupError) as error:
            raise BadAnswer(f"{self._url} answered {answer.text[:200]!r}") from error


class Scored:
    """With :mod:`flashmoa.scoring`: the likelier of two candidates.

    Args:
        likeliest: a prompt's likeliest first token, by its name; the first candidate.
    """

    def __init__(self, engine: EngineClient, likeliest: Mapping[str, int]) -> None:
        # Whoever asks keeps to a limit.
        self._scorer = Scorer(engine, concurrency=len(likeliest))
        self._likeliest = likeliest

    async def __call__(self, request: Request) -> Answer:
        first = self._likeliest[request.name]
        candidates = [first, first - 1 if first else 1]
        scores = await self._scorer.score(request.ids, [[token] for token in candidates])
        place = scores.logprobs.index(max(scores.logprobs))
        usage = scores.usage
        return Answer(
            candidates[place], scores.logprobs[0], usage.prompt_tokens, usage.cached_tokens or 0
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """All requests once. ``answers``: by their names."""

    seconds: float
    answers: Mapping[str, Answer]

    @property
    def prompt_tokens(self) -> int:
        return sum(one.prompt_tokens for one in self.answers.values())

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - sum(one.cached_tokens for one in self.answers.values())


async def play(ways: Sequence[Ask], requests: Sequence[Request], at_once: int) -> Pass:
    """All requests in their order, ``at_once`` of them at a time; several ways take turns."""
    waiting = list(enumerate(requests))
    waiting.reverse()
    answers: dict[str, Answer] = {}

    async def client() -> None:
        while waiting:
            number, request = waiting.pop()
            sent = time.perf_counter()
            answer = await ways[number % len(ways)](request)
            seconds = time.perf_counter() - sent
            answers[request.name] = Answer(
                answer.token, answer.logprob, answer.prompt_tokens, answer.cached_tokens, seconds
            )

    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(at_once):
            group.start_soon(client)
    return Pass(time.perf_counter() - started, answers)


def unique_tokens(requests: Sequence[Request]) -> int:
    """Tokens of a radix tree with all prompts: what has to be computed at least."""
    prompts = sorted(request.ids for request in requests)
    shared = sum(_common(before, after) for before, after in pairwise(prompts))
    return sum(map(len, prompts)) - shared


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(a), len(b)))


@dataclass(frozen=True, slots=True)
class Agreement:
    """How answers compare with those expected.

    Attributes:
        answers: that were compared. same: of these, with the same likeliest token.
        logprob: the largest difference of a log-probability, where they were told.
    """

    answers: int
    same: int
    logprob: float | None


def agreement(expected: Mapping[str, Answer], passes: Sequence[Pass]) -> Agreement:
    """Of all answers in ``passes`` with those in ``expected``, by their names."""
    found = [(expected[name], one) for each in passes for name, one in each.answers.items()]
    apart = [
        abs(one.logprob - other.logprob)
        for one, other in found
        if one.logprob is not None and other.logprob is not None
    ]
    return Agreement(
        answers=len(found),
        same=sum(one.token == other.token for one, other in found),
        logprob=max(apart, default=None),
    )
