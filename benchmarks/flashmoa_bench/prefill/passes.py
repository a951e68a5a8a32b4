"""Send prefill-only requests, as one generated token each or as scores, and tabulate the passes.

A pass sends all requests once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Annotated, Any

from pydantic import BaseModel

from flashmoa.engine import EngineClient
from flashmoa.scoring import Scorer
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.report import Column
from flashmoa_bench.harness.requests import TOKEN_IDS
from flashmoa_bench.harness.rounds import percentile, run_concurrently
from flashmoa_bench.prefill.mix import MixPrompt


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """A prompt of token ids."""

    name: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """The answer to a request; ``token`` is the likeliest first token.

    Attributes:
        logprob: natural logarithm of its probability; ``None`` if the engine does not report it.
        seconds: time from the request to its answer.
    """

    token: int
    logprob: float | None
    prompt_tokens: int
    cached_tokens: int
    seconds: float = 0.0


SendFunction = Callable[[PrefillRequest], Awaitable[PrefillAnswer]]


def to_requests(prompts: Sequence[MixPrompt]) -> list[PrefillRequest]:
    """Return a mix's requests with token ids that every vocabulary has."""
    return [
        PrefillRequest(prompt.name, [TOKEN_IDS[token % len(TOKEN_IDS)] for token in prompt.tokens])
        for prompt in prompts
    ]


class _Generated(BaseModel):
    meta_info: dict[str, Any]
    output_ids: list[int] = []


def token_sender(engine: EngineClient, *, logprobs: bool = False) -> SendFunction:
    """Make a function that asks SGLang for one greedy token, as without FlashMoA."""

    async def send(request: PrefillRequest) -> PrefillAnswer:
        sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": request.ids, "sampling_params": sampling, "return_logprob": logprobs}
        answer = await engine.ask("POST", "/generate", _Generated, body)
        meta, token = answer.meta_info, answer.output_ids[0]
        logprob = meta["output_token_logprobs"][0][0] if logprobs else None
        return PrefillAnswer(token, logprob, meta["prompt_tokens"], meta["cached_tokens"])

    return send


async def prefill(engine: EngineClient, ids: Sequence[int], **fields: Any) -> Mapping[str, Any]:
    """Ask any SGLang for the log-probabilities that ``fields`` name, by a prefill alone.

    Returns: SGLang's ``meta_info``.
    """
    # If another request of the batch decodes, SGLang applies every request's temperature.
    sampling = {"max_new_tokens": 0, "temperature": 1.0}
    body = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True, **fields}
    return (await engine.ask("POST", "/generate", _Generated, body)).meta_info


def prefill_sender(engine: EngineClient, likeliest: Mapping[str, int]) -> SendFunction:
    """Make a function that asks any SGLang, or a router, like :func:`score_sender`."""

    async def send(request: PrefillRequest) -> PrefillAnswer:
        candidates = _candidates(likeliest[request.name])
        meta = await prefill(engine, request.ids, token_ids_logprob=candidates)
        found = {token: logprob for logprob, token, *_ in meta["output_token_ids_logprobs"][0]}
        best = max(candidates, key=lambda token: found[token])
        prompt, cached = meta["prompt_tokens"], meta["cached_tokens"]
        return PrefillAnswer(best, found[candidates[0]], prompt, cached)

    return send


def _candidates(likeliest: int) -> list[int]:
    return [likeliest, likeliest - 1 if likeliest else 1]


def score_sender(engine: EngineClient, likeliest: Mapping[str, int]) -> SendFunction:
    """Make a function that asks :mod:`flashmoa.scoring` for the likelier of two candidates.

    Args:
        likeliest: each request's likeliest first token, by name. It is the first candidate.
    """
    # play() limits the number of requests at once.
    scorer = Scorer(engine, concurrency=len(likeliest))

    async def send(request: PrefillRequest) -> PrefillAnswer:
        candidates = _candidates(likeliest[request.name])
        scores = await scorer.score(request.ids, [[token] for token in candidates])
        best = candidates[scores.logprobs.index(max(scores.logprobs))]
        usage = scores.usage
        return PrefillAnswer(best, scores.logprobs[0], usage.prompt_tokens, usage.cached_tokens)

    return send


@dataclass(frozen=True, slots=True)
class PrefillPass:
    """The answers to all requests, by the requests' names."""

    seconds: float
    answers: Mapping[str, PrefillAnswer]

    @property
    def prompt_tokens(self) -> int:
        return sum(answer.prompt_tokens for answer in self.answers.values())

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - sum(answer.cached_tokens for answer in self.answers.values())


async def play(
    senders: Sequence[SendFunction], requests: Sequence[PrefillRequest], limit: int
) -> PrefillPass:
    """Send all requests in their order, at most ``limit`` at a time; the senders take turns."""

    async def send(numbered: tuple[int, PrefillRequest]) -> PrefillAnswer:
        number, request = numbered
        sent = clock.now()
        answer = await senders[number % len(senders)](request)
        return replace(answer, seconds=clock.now() - sent)

    started = clock.now()
    answers = await run_concurrently(send, list(enumerate(requests)), limit)
    seconds = clock.now() - started
    return PrefillPass(seconds, {r.name: a for r, a in zip(requests, answers, strict=True)})


def unique_tokens(requests: Sequence[PrefillRequest]) -> int:
    """Return the fewest tokens to compute: the tokens of a radix tree with all prompts."""
    prompts = sorted(request.ids for request in requests)
    shared = sum(_common_length(before, after) for before, after in pairwise(prompts))
    return sum(map(len, prompts)) - shared


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))


@dataclass(frozen=True, slots=True)
class Agreement:
    """Compares answers with the expected ones.

    Attributes:
        same: number of answers with the same likeliest token.
        logprob: largest difference between reported log-probabilities.
    """

    answers: int
    same: int
    logprob: float | None

    def __str__(self) -> str:
        apart = "" if self.logprob is None else f", {self.logprob:.0e}"
        return f"{self.same:,} of {self.answers:,}{apart}"


def agreement(expected: Mapping[str, PrefillAnswer], passes: Sequence[PrefillPass]) -> Agreement:
    """Compare all answers in ``passes`` with the expected answers of the same name."""
    pairs = [(expected[name], answer) for each in passes for name, answer in each.answers.items()]
    differences = [
        abs(known.logprob - answer.logprob)
        for known, answer in pairs
        if known.logprob is not None and answer.logprob is not None
    ]
    return Agreement(
        answers=len(pairs),
        same=sum(known.token == answer.token for known, answer in pairs),
        logprob=max(differences, default=None),
    )


@dataclass(frozen=True, slots=True)
class PassRow:
    """One way's figures; medians over rounds.

    Attributes:
        seconds: time until everything was answered; ``rounds`` has it for each round.
        duplicates: ``computed`` prompt tokens over the number of unique prompt tokens.
        p50, p99: percentiles of a request's seconds, over all rounds.
        gain: throughput over the reference's throughput.
    """

    way: Annotated[str, Column("")]
    seconds: Annotated[float, Column("seconds", "{:.2f}")]
    rounds: list[float]
    tokens_per_second: Annotated[float, Column("tokens/s", "{:,.0f}")]
    requests_per_second: Annotated[float, Column("requests/s", "{:.1f}")]
    computed: Annotated[float, Column("computed", "{:,.0f}")]
    duplicates: Annotated[float, Column("of unique", "{:.2f}")]
    p50: Annotated[float, Column("p50", "{:.2f}")]
    p99: Annotated[float, Column("p99", "{:.2f}")]
    gain: Annotated[float, Column("gain", "{:.2f}")]
    agreement: Annotated[Agreement, Column("same, logprobs")]


def summarise(
    passes: Mapping[str, Sequence[PrefillPass]],
    reference: str,
    expected: Mapping[str, PrefillAnswer],
    unique: int,
) -> list[PassRow]:
    """Summarise each way's passes.

    Args:
        reference: the way to compare with.
        unique: the result of :func:`unique_tokens`.
    """
    base = median_seconds(passes[reference])
    rows: list[PassRow] = []
    for way, group in passes.items():
        seconds, computed = median_seconds(group), median(each.computed_tokens for each in group)
        waits = [answer.seconds for each in group for answer in each.answers.values()]
        rows.append(
            PassRow(
                way=way,
                seconds=seconds,
                rounds=[each.seconds for each in group],
                tokens_per_second=group[0].prompt_tokens / seconds,
                requests_per_second=len(group[0].answers) / seconds,
                computed=computed,
                duplicates=computed / unique,
                p50=percentile(waits, 0.5),
                p99=percentile(waits, 0.99),
                gain=base / seconds,
                agreement=agreement(expected, group),
            )
        )
    return rows


def median_seconds(passes: Sequence[PrefillPass]) -> float:
    return median(each.seconds for each in passes)
