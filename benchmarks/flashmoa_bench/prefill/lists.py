"""Measure one request with a list of items: stock SGLang's /v1/score, FlashMoA's, and embeddings.

Each item is a prompt that begins with the query, which the engines should compute once. As a
reranker by embeddings would, the last way embeds the query and each item by itself, which is less
to compute, and knows less. With --enable-mis stock SGLang packs all items into one prompt; that
needs FlashInfer, so give such an engine's URL.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import anyio
import httpx
from rich.console import Console

from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import make_parser, positive
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.report import Report, make_table
from flashmoa_bench.harness.requests import random_ids
from flashmoa_bench.harness.rounds import RoundPlayer

STOCK, OURS, STREAMED = "stock", "flashmoa", "flashmoa-streamed"
EMBEDDING, MIS = "embedding", "mis"
ROLES = (
    Role(STOCK, plugin=False),
    Role(OURS, plugin=True),
    Role(EMBEDDING, plugin=False, arguments=("--is-embedding",), optional=True),
)
_WITH_MIS = Role(MIS, plugin=False, arguments=("--enable-mis",), optional=True)
_LABELS = [1000, 1001]
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class ListAnswer:
    """The answer to one list.

    Attributes:
        seconds: until all results were there.
        first: seconds until the first result was there.
        scores: the items' scores; ``None`` of embeddings.
        computed: number of prompt tokens that were computed; ``None`` if the engine does not tell.
    """

    seconds: float
    first: float
    scores: list[list[float]] | None
    computed: int | None


@dataclass(frozen=True, slots=True)
class ListRow:
    """The figures of one way and one length of lists; medians over rounds.

    Attributes:
        rounds: seconds of each round.
        gain: items a second over those of stock SGLang.
        difference: the largest difference of a score from stock SGLang's; ``None`` of embeddings.
    """

    way: str
    items: int
    seconds: float
    rounds: list[float]
    first: float
    items_per_second: float
    gain: float
    computed: float | None
    difference: float | None


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench score-lists`` and return the exit status."""
    parser = make_parser("score_lists", __doc__, (*ROLES, _WITH_MIS))
    parser.add_argument("--items", type=positive, nargs="+", default=[1, 16, 128])
    parser.add_argument("--query", type=positive, default=512, help="tokens of the query")
    parser.add_argument("--item", type=positive, default=64, help="tokens of each item")
    anyio.run(_main, parser.parse_args(arguments))
    return 0


async def _main(options: argparse.Namespace) -> None:
    report = Report("score_lists", options)
    roles = (*ROLES, _WITH_MIS) if options.mis_url else ROLES
    tokens = options.query + 2 * max(options.items) * options.item
    async with (
        report.connect(roles, 2 * tokens) as engines,
        httpx.AsyncClient(timeout=clock.machine_seconds(_TIMEOUT_SECONDS)) as http,
    ):
        rows = await _measure(engines, http, options, report.console)
    show(rows, report.console)
    report.save({"rows": [asdict(row) for row in rows]})


async def _measure(
    engines: Engines, http: httpx.AsyncClient, options: argparse.Namespace, console: Console
) -> list[ListRow]:
    dice = random.Random(options.seed)
    ways = [way for way in (STOCK, MIS, OURS, EMBEDDING) if way in engines]
    ways.insert(ways.index(OURS) + 1, STREAMED)
    rows: list[ListRow] = []
    with RoundPlayer(console, options.repeats, len(ways) * len(options.items)) as player:
        for count in options.items:
            # All ways of a round have one list, so that their scores can be compared.
            lists = [_make_list(dice, options, count) for _ in range(options.repeats + 1)]
            asked = dict.fromkeys(ways, 0)

            async def run(way: str, lists: Any = lists, asked: Any = asked) -> ListAnswer:
                engine = engines[OURS if way == STREAMED else way]
                await engine.flush_cache()
                body = lists[asked[way]]
                asked[way] += 1
                return await _ask(http, engine.url, way, body)

            for way in ways:
                await run(way)
            answers = await player.play(ways, run, f"{count} items")
            rows += summarise(count, answers)
    return rows


def _make_list(dice: random.Random, options: argparse.Namespace, count: int) -> dict[str, Any]:
    query = random_ids(dice, options.query)
    return {"query": query, "items": [random_ids(dice, options.item) for _ in range(count)]}


async def _ask(http: httpx.AsyncClient, url: str, way: str, body: Mapping[str, Any]) -> ListAnswer:
    started = clock.now()
    if way == EMBEDDING:
        texts = {"model": "default", "input": [body["query"], *body["items"]]}
        (await http.post(f"{url}/v1/embeddings", json=texts)).raise_for_status()
        seconds = clock.now() - started
        return ListAnswer(seconds, seconds, None, sum(map(len, texts["input"])))
    request = {**body, "label_token_ids": _LABELS, "stream": way == STREAMED}
    if way == STREAMED:
        return await _read_stream(http, url, request, started)
    reply = await http.post(f"{url}/v1/score", json=request)
    seconds = clock.now() - started
    answer = reply.raise_for_status().json()
    return ListAnswer(seconds, seconds, answer["scores"], _computed(answer["usage"]))


async def _read_stream(
    http: httpx.AsyncClient, url: str, request: Mapping[str, Any], started: float
) -> ListAnswer:
    first: float | None = None
    scores: dict[int, list[float]] = {}
    usage: dict[str, Any] = {}
    async with http.stream("POST", f"{url}/v1/score", json=dict(request)) as reply:
        async for line in reply.raise_for_status().aiter_lines():
            if not line.startswith("data: {"):
                continue
            first = clock.now() - started if first is None else first
            event = json.loads(line.removeprefix("data: "))
            if "index" in event:
                scores[event["index"]] = event["scores"]
            usage = event.get("usage", usage)
    seconds = clock.now() - started
    in_order = [scores[index] for index in sorted(scores)]
    return ListAnswer(seconds, first or seconds, in_order, _computed(usage))


def _computed(usage: Mapping[str, Any]) -> int | None:
    details = usage.get("prompt_tokens_details")
    return usage["prompt_tokens"] - details["cached_tokens"] if details else None


def summarise(items: int, answers: Mapping[str, Sequence[ListAnswer]]) -> list[ListRow]:
    """Return a row for each way; ``answers`` are in the order of the rounds."""
    stock = answers[STOCK]
    base = median(answer.seconds for answer in stock)
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


def show(rows: Sequence[ListRow], console: Console) -> None:
    """Print the table."""
    columns = ("items", "ms", "first, ms", "items/s", "gain", "computed", "difference")
    table = make_table("One request with a list of items", "", *columns)
    for row in rows:
        table.add_row(
            row.way,
            f"{row.items:,}",
            f"{row.seconds * 1000:.0f}",
            f"{row.first * 1000:.0f}",
            f"{row.items_per_second:,.0f}",
            f"{row.gain:.2f}",
            "" if row.computed is None else f"{row.computed:,.0f}",
            "" if row.difference is None else f"{row.difference:.0e}",
        )
    console.print(table)
