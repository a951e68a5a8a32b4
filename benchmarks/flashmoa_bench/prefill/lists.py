"""Measure one request with a list of items: stock SGLang's /v1/score, FlashMoA's, and embeddings.

Each item's prompt begins with the query, which an engine should compute once. Stock SGLang shares
the query only between forwards, so the size of its forwards decides how much it computes. Stock
engines of several sizes are measured (--stock-forwards), and FlashMoA is compared with the fastest.
FlashMoA gets the list in one request and, for comparison, each item in a request of its own. Like a
reranker, one way embeds the query and each item separately: less work, and less knowledge. A
cross-encoder of the same size returns a score instead of a next token.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any

import httpx

from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import Option, command, positive, stock_forwards
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.harness.requests import random_ids
from flashmoa_bench.harness.rounds import RoundPlayer, run_concurrently

STOCK, OURS, SINGLE = "stock", "flashmoa", "flashmoa-single"
EMBEDDING, CROSS_ENCODER = "embedding", "cross_encoder"


@dataclass(frozen=True, slots=True)
class ListAnswer:
    """The answer to one list.

    Attributes:
        seconds, first: time until the last and the first result.
        scores: the items' scores; ``None`` from a model with another kind of scores.
        computed: number of computed prompt tokens; ``None`` if the engine does not report it.
    """

    seconds: float
    first: float
    scores: list[list[float]] | None
    computed: int | None


async def ask_list(
    http: httpx.AsyncClient, url: str, way: str, body: Mapping[str, Any]
) -> ListAnswer:
    """Ask an engine in one way, such as ``SINGLE``; ``body`` has ``query`` and ``items`` as ids.

    Raises: httpx.HTTPError if it does not answer.
    """
    started = clock.now()
    if way == EMBEDDING:
        texts = {"model": "default", "input": [body["query"], *body["items"]]}
        (await http.post(f"{url}/v1/embeddings", json=texts)).raise_for_status()
        seconds = clock.now() - started
        return ListAnswer(seconds, seconds, None, sum(map(len, texts["input"])))
    request = {**body, "label_token_ids": [1000, 1001]}
    if way == SINGLE:
        return await _ask_one_by_one(http, url, request, started)
    reply = await http.post(f"{url}/v1/score", json=request)
    seconds = clock.now() - started
    answer = reply.raise_for_status().json()
    scores = None if way == CROSS_ENCODER else answer["scores"]
    return ListAnswer(seconds, seconds, scores, _computed(answer["usage"]))


async def _ask_one_by_one(
    http: httpx.AsyncClient, url: str, request: Mapping[str, Any], started: float
) -> ListAnswer:
    """Ask for each item in a request of its own, all at once."""
    done: list[float] = []

    async def ask(item: Any) -> Any:
        reply = await http.post(f"{url}/v1/score", json={**request, "items": [item]})
        done.append(clock.now() - started)
        return reply.raise_for_status().json()

    answers = await run_concurrently(ask, request["items"])
    computed = [_computed(answer["usage"]) or 0 for answer in answers]
    scores = [answer["scores"][0] for answer in answers]
    return ListAnswer(done[-1], done[0], scores, sum(computed))


def _computed(usage: Mapping[str, Any]) -> int | None:
    details = usage.get("prompt_tokens_details")
    return usage["prompt_tokens"] - details["cached_tokens"] if details else None


ROLES = (
    Role(STOCK, plugin=False),
    Role(OURS, plugin=True),
    Role(EMBEDDING, plugin=False, arguments=("--is-embedding",), optional=True),
)
_CROSS_ENCODER = Role(CROSS_ENCODER, plugin=False, optional=True)


@dataclass(frozen=True, slots=True)
class ListRow:
    """One way's figures for lists of a length; medians over rounds.

    Attributes:
        gain: items per second over the fastest stock engine's.
        bound: measured seconds of a single forward with the query and each item once.
        difference: largest difference of a score from stock SGLang's; ``None`` from a model with
            another kind of scores.
    """

    way: Annotated[str, Column("")]
    items: Annotated[int, Column("items", "{:,}")]
    seconds: Annotated[float, Column("ms", "{:.0f}", 1000)]
    rounds: list[float]
    first: Annotated[float, Column("first", "{:.0f}", 1000)]
    items_per_second: Annotated[float, Column("items/s", "{:,.0f}")]
    gain: Annotated[float, Column("of best stock", "{:.2f}")]
    bound: Annotated[float | None, Column("bound", "{:.0f}", 1000)]
    computed: Annotated[float | None, Column("computed", "{:,.0f}")]
    difference: Annotated[float | None, Column("difference", "{:.0e}")]


async def _measure(report: Report) -> None:
    options, dice = report.options, random.Random(report.options.seed)
    rows: list[ListRow] = []
    # Requests for single items need a connection each. SGLang closes a connection that is idle for
    # five seconds.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
    timeout = clock.machine_seconds(600)
    pool = 2 * (options.query + 2 * max(options.items) * options.item)
    async with (
        report.connect(_make_roles(options), pool) as engines,
        httpx.AsyncClient(timeout=timeout, limits=limits) as http,
    ):
        costs = (await engines[OURS].info()).costs
        ways = [
            way for name in engines.clients for way in ((SINGLE, OURS) if name == OURS else (name,))
        ]
        with RoundPlayer(report.console, options.repeats, len(ways) * len(options.items)) as player:
            for count in options.items:
                # All ways of a round get the same list, so that their scores can be compared.
                lists = [_make_list(dice, options, count) for _ in range(options.repeats + 1)]
                asked = dict.fromkeys(ways, 0)

                async def run(way: str, lists: Any = lists, asked: Any = asked) -> ListAnswer:
                    engine = engines[OURS if way == SINGLE else way]
                    await engine.flush_cache()
                    body = lists[asked[way]]
                    asked[way] += 1
                    return await ask_list(http, engine.url, way, body)

                answers = await player.play(ways, run, f"{count} items")
                tokens = options.query + count * options.item
                bound = forward_seconds(costs.points if costs else [], tokens)
                rows += summarise(count, answers, bound)
    report.show("One request with a list of items", rows)
    report.save({"rows": rows})


def _make_roles(options: argparse.Namespace) -> list[Role]:
    stock, ours, embedding = ROLES
    sized = [
        Role(
            f"{STOCK}_{tokens}",
            plugin=False,
            arguments=("--chunked-prefill-size", str(tokens)),
            optional=True,
        )
        for tokens in options.stock_forwards
    ]
    roles = [stock, *sized, ours]
    if not options.device:
        shape = f"{options.shape}_{CROSS_ENCODER}"
        roles += (embedding, replace(_CROSS_ENCODER, shape=shape))
    return roles


def _make_list(dice: random.Random, options: argparse.Namespace, count: int) -> dict[str, Any]:
    query = random_ids(dice, options.query)
    return {"query": query, "items": [random_ids(dice, options.item) for _ in range(count)]}


def forward_seconds(points: Sequence[tuple[int, float]], tokens: int) -> float | None:
    """Interpolate the seconds of a forward linearly between measured (tokens, seconds).

    Returns: ``None`` with fewer than two measurements.
    """
    if len(points) < 2:
        return None
    above = next((i for i, (size, _) in enumerate(points) if size >= tokens), len(points) - 1)
    (low, start), (high, end) = points[max(above, 1) - 1], points[max(above, 1)]
    return start + (end - start) * (tokens - low) / (high - low)


def summarise(
    items: int, answers: Mapping[str, Sequence[ListAnswer]], bound: float | None
) -> list[ListRow]:
    """Return a row for each way, given its answers in the order of the rounds."""
    stock = answers[STOCK]
    base = min(
        median(answer.seconds for answer in rounds)
        for way, rounds in answers.items()
        if way.startswith(STOCK)
    )
    rows: list[ListRow] = []
    for way, rounds in answers.items():
        seconds = median(answer.seconds for answer in rounds)
        computed = [answer.computed for answer in rounds if answer.computed is not None]
        rows.append(
            ListRow(
                way=way,
                items=items,
                seconds=seconds,
                rounds=[answer.seconds for answer in rounds],
                first=median(answer.first for answer in rounds),
                items_per_second=items / seconds,
                gain=base / seconds,
                bound=bound,
                computed=median(computed) if computed else None,
                difference=_difference(stock, rounds),
            )
        )
    return rows


def _difference(stock: Sequence[ListAnswer], other: Sequence[ListAnswer]) -> float | None:
    if other[0].scores is None:
        return None
    return max(
        abs(one - its)
        for answer, same in zip(stock, other, strict=True)
        for item, own in zip(answer.scores or (), same.scores or (), strict=True)
        for one, its in zip(item, own, strict=True)
    )


main = command(
    "score_lists",
    __doc__,
    _measure,
    (*ROLES, _CROSS_ENCODER),
    Option("--items", positive, [1, 8, 32, 128], "items of a list"),
    stock_forwards(512, 1024, 2048),
    Option("--query", positive, 64, "tokens of the query"),
    Option("--item", positive, 64, "tokens of each item"),
)
