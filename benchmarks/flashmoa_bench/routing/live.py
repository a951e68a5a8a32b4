"""Running routers over the same running engines, and the simulator beside them.

Requests about a few documents and others about nothing in common, answered with one token each.
Every round begins with empty caches and goes through each router in turn. The simulator replays the
same prompts, with engines of the same cache and forwards; its clock is arbitrary, its order is not.
"""

from __future__ import annotations

import argparse
import random
import string
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import anyio
import httpx
from rich.console import Console
from rich.table import Table

from flashmoa.router.blocks import BLOCK_TOKENS, token_blocks
from flashmoa.router.flops import TokenCount, saturation
from flashmoa_bench.harness.command_line import positive
from flashmoa_bench.harness.report import Report, terminal
from flashmoa_bench.prefill.mix import MixRequest
from flashmoa_bench.routing.engines import Machine, replay
from flashmoa_bench.routing.simulation import POLICIES, SILENT


@dataclass(frozen=True, slots=True)
class RouterRow:
    """One round through one router, or simulated (``seconds`` 0)."""

    round: int
    router: str
    seconds: float
    prompt_tokens: int
    cached_tokens: int

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of running engines and routers."""
    group = parser.add_argument_group("running routers instead, and the simulator beside them")
    group.add_argument("--engine", action="append", default=[], metavar="URL")
    group.add_argument("--router", action="append", default=[], type=_named, metavar="NAME=URL")
    group.add_argument("--rounds", type=positive, default=2)
    group.add_argument("--documents", type=positive, default=6)
    group.add_argument("--siblings", type=positive, default=8, help="requests about each")
    group.add_argument("--others", type=positive, default=40, help="requests about no document")
    group.add_argument("--words", type=positive, default=240, help="of a document")


def _named(text: str) -> tuple[str, str]:
    name, found, url = text.partition("=")
    if not (name and found and url):
        raise argparse.ArgumentTypeError(f"must be NAME=URL, not {text!r}")
    return name, url.rstrip("/")


async def measure(options: argparse.Namespace) -> None:
    """Measure every router in turn, print the table and write the report."""
    console = terminal()
    report = Report("router", options)
    report.head(console)
    rows: list[RouterRow] = []
    async with httpx.AsyncClient(timeout=300) as http:
        for number in range(options.rounds):
            texts = prompts(options, options.seed + number)
            turn = number % len(options.router)
            for name, url in options.router[turn:] + options.router[:turn]:
                for engine in options.engine:
                    (await http.post(f"{engine}/flush_cache?timeout=30")).raise_for_status()
                rows.append(
                    await _measure(http, url, texts, options, RouterRow(number, name, 0, 0, 0))
                )
                console.print(f"round {number}, {name}: {rows[-1].seconds:.1f} s", highlight=False)
            rows += await _simulate(http, texts, options, number)
    show(rows, console)
    report.save(console, {"rows": [asdict(row) for row in rows]})


def prompts(options: argparse.Namespace, seed: int) -> list[str]:
    """Return prompts about documents, each one's in a third of the whole, among the others."""
    dice = random.Random(seed)

    def words(count: int) -> str:
        return "".join(
            " " + "".join(dice.choices(string.ascii_lowercase, k=5)) for _ in range(count)
        )

    placed: list[tuple[float, str]] = []
    for _ in range(options.documents):
        document, begin = words(options.words), dice.random() * 2 / 3
        placed += [
            (begin + dice.random() / 3, document + words(10)) for _ in range(options.siblings)
        ]
    for _ in range(options.others):
        placed.append((dice.random(), words(dice.randrange(20, options.words // 3 + 21))))
    return [text for _, text in sorted(placed)]


async def _measure(
    http: httpx.AsyncClient,
    url: str,
    texts: Sequence[str],
    options: argparse.Namespace,
    row: RouterRow,
) -> RouterRow:
    waiting, told = list(reversed(texts)), list[dict[str, Any]]()
    sampling = {"max_new_tokens": 1, "temperature": 0}

    async def ask() -> None:
        while waiting:
            body = {"text": waiting.pop(), "sampling_params": sampling}
            answer = await http.post(f"{url}/generate", json=body)
            told.append(answer.raise_for_status().json()["meta_info"])

    start = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(options.concurrency):
            group.start_soon(ask)
    seconds = time.perf_counter() - start
    prompt, cached = (
        sum(int(one[name]) for one in told) for name in ("prompt_tokens", "cached_tokens")
    )
    return RouterRow(row.round, row.router, seconds, prompt, cached)


async def _simulate(
    http: httpx.AsyncClient, texts: Sequence[str], options: argparse.Namespace, number: int
) -> list[RouterRow]:
    engine, asks = options.engine[0], list[MixRequest]()
    told = (await http.get(f"{engine}/server_info")).raise_for_status().json()
    for place, text in enumerate(texts):
        answer = await http.post(f"{engine}/v1/tokenize", json={"prompt": text})
        asks.append(
            MixRequest(str(place), "", token_blocks(answer.raise_for_status().json()["tokens"]))
        )
    batch, measure = int(told["chunked_prefill_size"]), TokenCount()
    blocks = int(told["max_total_num_tokens"]) // BLOCK_TOKENS
    machine = Machine(measure, 1000.0, batch, blocks, reports=False)
    rows: list[RouterRow] = []
    for name in (name for name in POLICIES if name != SILENT):
        outcome = replay(
            asks,
            POLICIES[name](number),
            dict.fromkeys(options.engine, machine),
            saturation=saturation(measure, batch),
            concurrency=options.concurrency,
        )
        rows.append(RouterRow(number, f"simulated {name}", 0.0, outcome.tokens, outcome.cached))
    return rows


def show(rows: Sequence[RouterRow], console: Console) -> None:
    """Print the table; a column per round."""
    names = dict.fromkeys(row.router for row in rows)
    table = Table(title="Seconds, and prompt tokens that were cached", title_justify="left")
    for column in ("router", *(f"round {n}" for n in sorted({row.round for row in rows}))):
        table.add_column(column)
    for name in names:
        own = [row for row in rows if row.router == name]
        cells = [
            f"{row.seconds:.1f} s, {row.hit_rate:.1%}" if row.seconds else f"{row.hit_rate:.1%}"
            for row in sorted(own, key=lambda row: row.round)
        ]
        table.add_row(name, *cells)
    console.print(table)
