"""Compare running routers over the same running engines, and the simulator with them.

Every round begins with empty caches and goes through each router in turn. The simulator replays the
same prompts, with engines that have the same caches and forwards. Its seconds are arbitrary, but
its ranking of the policies is not.
"""

from __future__ import annotations

import argparse
import random
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx
from rich.console import Console

from flashmoa.engine.modelled_gpus import read_device
from flashmoa.router.blocks import BLOCK_TOKENS, token_blocks
from flashmoa.router.flops import TokenCount
from flashmoa.router.policies import SATURATION_MARGIN
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import positive
from flashmoa_bench.harness.modelled_gpus import common_slowdown
from flashmoa_bench.harness.report import Report, make_table
from flashmoa_bench.harness.rounds import run_concurrently
from flashmoa_bench.prefill.mix import MixRequest
from flashmoa_bench.routing.engines import Machine, replay
from flashmoa_bench.routing.simulation import POLICIES, SEVERAL, SILENT


@dataclass(frozen=True, slots=True)
class RouterRow:
    """The result of one round through one router; ``seconds`` is 0 if it was simulated."""

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
    group = parser.add_argument_group("running routers instead, and the simulator with them")
    group.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="URL",
        help="an engine behind the routers; give it once for each engine",
    )
    group.add_argument(
        "--router",
        action="append",
        default=[],
        type=_parse_named_url,
        metavar="NAME=URL",
        help="a router to compare, with its name in the table; give it once for each router",
    )
    group.add_argument("--rounds", type=positive, default=2, help="rounds through all routers")
    group.add_argument("--documents", type=positive, default=6, help="documents in a round")
    group.add_argument("--siblings", type=positive, default=8, help="requests about each document")
    group.add_argument("--others", type=positive, default=40, help="requests about no document")
    group.add_argument("--words", type=positive, default=240, help="words of a document")


def _parse_named_url(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not (name and equals and url):
        raise argparse.ArgumentTypeError(f"must be NAME=URL, not {text!r}")
    return name, url.rstrip("/")


async def measure(options: argparse.Namespace) -> None:
    """Measure every router in turn, print the table and write the report."""
    report = Report("router", options)
    report.print_head()
    devices = {url: device for url in options.engine if (device := await read_device(url))}
    with clock.slowed_down(common_slowdown(devices)):
        rows = await _measure_rounds(options, report)
    show(rows, report.console)
    report.save({"rows": [asdict(row) for row in rows]})


async def _measure_rounds(options: argparse.Namespace, report: Report) -> list[RouterRow]:
    rows: list[RouterRow] = []
    limits = httpx.Limits(max_connections=None)  # --concurrency may be more than httpx's 100.
    async with httpx.AsyncClient(timeout=clock.machine_seconds(300), limits=limits) as http:
        for number in range(options.rounds):
            prompts = make_prompts(options, options.seed + number)
            # Each round begins with another router, so that none is always measured first.
            turn = number % len(options.router)
            for name, url in options.router[turn:] + options.router[:turn]:
                for engine in options.engine:
                    (await http.post(f"{engine}/flush_cache?timeout=30")).raise_for_status()
                row = await _measure_round(http, (name, url), prompts, options, number)
                rows.append(row)
                report.console.print(
                    f"round {number}, {name}: {row.seconds:.1f} s", highlight=False
                )
            rows += await _simulate(http, prompts, options, number)
    return rows


def make_prompts(options: argparse.Namespace, seed: int) -> list[str]:
    """Return prompts about documents, mixed with others about none.

    The prompts about one document come within a third of the whole list.
    """
    dice = random.Random(seed)

    def make_words(count: int) -> str:
        return "".join(
            " " + "".join(dice.choices(string.ascii_lowercase, k=5)) for _ in range(count)
        )

    # Each prompt with its place in the list, from 0 to 1.
    placed: list[tuple[float, str]] = []
    for _ in range(options.documents):
        document, begin = make_words(options.words), dice.random() * 2 / 3
        placed += [
            (begin + dice.random() / 3, document + make_words(10)) for _ in range(options.siblings)
        ]
    for _ in range(options.others):
        placed.append((dice.random(), make_words(dice.randrange(20, options.words // 3 + 21))))
    return [prompt for _place, prompt in sorted(placed)]


async def _measure_round(
    http: httpx.AsyncClient,
    router: tuple[str, str],
    prompts: Sequence[str],
    options: argparse.Namespace,
    number: int,
) -> RouterRow:
    """Send all prompts to a router, given as its name and URL, in round ``number``."""
    name, url = router

    async def send(prompt: str) -> dict[str, Any]:
        body = {"text": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        answer = await http.post(f"{url}/generate", json=body)
        return answer.raise_for_status().json()["meta_info"]

    start = clock.now()
    answers = await run_concurrently(send, prompts, options.concurrency)
    seconds = clock.now() - start
    prompt_tokens = sum(int(answer["prompt_tokens"]) for answer in answers)
    cached_tokens = sum(int(answer["cached_tokens"]) for answer in answers)
    return RouterRow(number, name, seconds, prompt_tokens, cached_tokens)


async def _simulate(
    http: httpx.AsyncClient, prompts: Sequence[str], options: argparse.Namespace, number: int
) -> list[RouterRow]:
    """Replay the prompts with every policy, on engines like the first of the running ones."""
    engine = options.engine[0]
    settings = (await http.get(f"{engine}/server_info")).raise_for_status().json()
    requests: list[MixRequest] = []
    for place, prompt in enumerate(prompts):
        answer = await http.post(f"{engine}/v1/tokenize", json={"prompt": prompt})
        tokens = answer.raise_for_status().json()["tokens"]
        requests.append(MixRequest(str(place), "", token_blocks(tokens)))
    batch_tokens, measure = int(settings["chunked_prefill_size"]), TokenCount()
    blocks = int(settings["max_total_num_tokens"]) // BLOCK_TOKENS
    machine = Machine(measure, _arbitrary_seconds, batch_tokens, blocks, reports=False)
    rows: list[RouterRow] = []
    # No simulated engine reports its blocks here, so SILENT would be the same as ``prefix_aware``.
    for name in (name for name in POLICIES if name not in (SILENT, SEVERAL)):
        outcome = replay(
            requests,
            POLICIES[name](number),
            dict.fromkeys(options.engine, machine),
            saturation=int(SATURATION_MARGIN * batch_tokens),
            concurrency=options.concurrency,
        )
        rows.append(RouterRow(number, f"simulated {name}", 0.0, outcome.tokens, outcome.cached))
    return rows


def _arbitrary_seconds(prompts: tuple[tuple[int, int], ...]) -> float:
    """Return the seconds of a forward at a thousand tokens a second."""
    return sum(new for _cached, new in prompts) / 1000


def show(rows: Sequence[RouterRow], console: Console) -> None:
    """Print the table, with a column for each round."""
    names = dict.fromkeys(row.router for row in rows)
    columns = ("router", *(f"round {number}" for number in sorted({row.round for row in rows})))
    table = make_table("Seconds, and prompt tokens that were cached", *columns, left=columns)
    for name in names:
        own = [row for row in rows if row.router == name]
        cells = [
            f"{row.seconds:.1f} s, {row.hit_rate:.1%}" if row.seconds else f"{row.hit_rate:.1%}"
            for row in sorted(own, key=lambda row: row.round)
        ]
        table.add_row(name, *cells)
    console.print(table)
