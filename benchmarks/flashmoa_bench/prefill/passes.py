"""Passes of prefill-only requests: as one generated token each and as scores; their tables."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import anyio
import httpx
from rich.console import Console
from rich.table import Table

from flashmoa.engine import BadAnswer, EngineClient
from flashmoa.scoring import Scorer
from flashmoa_bench.harness.rounds import percentile

_ONE_TOKEN = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """A prompt, as token ids."""

    name: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
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


AskFunction = Callable[[PrefillRequest], Awaitable[PrefillAnswer]]


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

    async def __call__(self, request: PrefillRequest) -> PrefillAnswer:
        """Ask for one token.

        Raises: BadAnswer for anything but a token.
        """
        body = {"input_ids": request.ids, "sampling_params": _ONE_TOKEN, **self._more}
        answer = await self._http.post(self._url, json=body)
        try:
            told = answer.raise_for_status().json()
            meta: Mapping[str, Any] = told["meta_info"]
            logprob = meta["output_token_logprobs"][0][0] if self._more else None
            prompt, cached = int(meta["prompt_tokens"]), int(meta["cached_tokens"])
            return PrefillAnswer(int(told["output_ids"][0]), logprob, prompt, cached)
        except (httpx.HTTPStatusError, ValueError, LookupError) as error:
            raise BadAnswer(f"{self._url} answered {answer.text[:200]!r}") from error


class Scored:
    """With :mod:`flashmoa.scoring`: the likelier of two candidates.

    Args:
        likeliest: a prompt's likeliest first token, by its name; the first candidate.
    """

    def __init__(self, engine: EngineClient, likeliest: Mapping[str, int]) -> None:
        # play() limits how many requests are sent at once.
        self._scorer = Scorer(engine, concurrency=len(likeliest))
        self._likeliest = likeliest

    async def __call__(self, request: PrefillRequest) -> PrefillAnswer:
        first = self._likeliest[request.name]
        candidates = [first, first - 1 if first else 1]
        scores = await self._scorer.score(request.ids, [[token] for token in candidates])
        place = scores.logprobs.index(max(scores.logprobs))
        usage = scores.usage
        return PrefillAnswer(
            candidates[place], scores.logprobs[0], usage.prompt_tokens, usage.cached_tokens or 0
        )


@dataclass(frozen=True, slots=True)
class PrefillPass:
    """All requests once. ``answers``: by their names."""

    seconds: float
    answers: Mapping[str, PrefillAnswer]

    @property
    def prompt_tokens(self) -> int:
        return sum(one.prompt_tokens for one in self.answers.values())

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - sum(one.cached_tokens for one in self.answers.values())


async def play(
    ways: Sequence[AskFunction], requests: Sequence[PrefillRequest], at_once: int
) -> PrefillPass:
    """Send all requests in their order, ``at_once`` of them at a time; several ways take turns."""
    waiting = list(enumerate(requests))
    waiting.reverse()
    answers: dict[str, PrefillAnswer] = {}

    async def client() -> None:
        while waiting:
            number, request = waiting.pop()
            sent = time.perf_counter()
            answer = await ways[number % len(ways)](request)
            seconds = time.perf_counter() - sent
            answers[request.name] = PrefillAnswer(
                answer.token, answer.logprob, answer.prompt_tokens, answer.cached_tokens, seconds
            )

    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(at_once):
            group.start_soon(client)
    return PrefillPass(time.perf_counter() - started, answers)


def unique_tokens(requests: Sequence[PrefillRequest]) -> int:
    """Return the tokens of a radix tree with all prompts: what has to be computed at least."""
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


def agreement(expected: Mapping[str, PrefillAnswer], passes: Sequence[PrefillPass]) -> Agreement:
    """Compare all answers in ``passes`` with those in ``expected``, by their names."""
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


@dataclass(frozen=True, slots=True)
class PassRow:
    """One way; medians over rounds.

    Attributes:
        seconds: until everything was answered. rounds: of each round.
        computed: prompt tokens that were computed. duplicates: these over the unique ones.
        p50, p99: seconds of a request, over all rounds.
        gain: the throughput over that of the reference.
    """

    way: str
    seconds: float
    rounds: list[float]
    tokens_per_second: float
    requests_per_second: float
    computed: float
    duplicates: float
    p50: float
    p99: float
    gain: float
    agreement: Agreement


def summarise(
    passes: Mapping[str, Sequence[PrefillPass]],
    reference: str,
    expected: Mapping[str, PrefillAnswer],
    unique: int,
) -> list[PassRow]:
    """Summarise each way's passes.

    Args:
        reference: the way that gains are over.
        unique: tokens of all prompts, each shared one counted once.
    """
    base = seconds_of(passes[reference])
    rows: list[PassRow] = []
    for way, each in passes.items():
        seconds, computed = seconds_of(each), median(one.computed_tokens for one in each)
        waited = [answer.seconds for one in each for answer in one.answers.values()]
        rows.append(
            PassRow(
                way=way,
                seconds=seconds,
                rounds=[one.seconds for one in each],
                tokens_per_second=each[0].prompt_tokens / seconds,
                requests_per_second=len(each[0].answers) / seconds,
                computed=computed,
                duplicates=computed / unique,
                p50=percentile(waited, 0.5),
                p99=percentile(waited, 0.99),
                gain=base / seconds,
                agreement=agreement(expected, each),
            )
        )
    return rows


def seconds_of(passes: Sequence[PrefillPass]) -> float:
    """Return the median of their lengths."""
    return median(one.seconds for one in passes)


def show(title: str, rows: Sequence[PassRow], goals: Mapping[str, float], console: Console) -> None:
    """Print one table; nothing where there are no rows. ``goals``: gains, by way."""
    if not rows:
        return
    table = Table(title=title, title_justify="left")
    columns = ("seconds", "tokens/s", "requests/s", "computed", "of unique", "p50", "p99")
    table.add_column("")
    for name in (*columns, "gain", "goal", "same", "logprobs"):
        table.add_column(name, justify="right")
    for row in rows:
        same = row.agreement
        table.add_row(
            row.way,
            f"{row.seconds:.2f}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.requests_per_second:.1f}",
            f"{row.computed:,.0f}",
            f"{row.duplicates:.2f}",
            f"{row.p50:.2f}",
            f"{row.p99:.2f}",
            f"{row.gain:.2f}",
            f"{goals[row.way]:.2f}" if row.way in goals else "",
            f"{same.same:,} of {same.answers:,}",
            "" if same.logprob is None else f"{same.logprob:.0e}",
        )
    console.print(table)
