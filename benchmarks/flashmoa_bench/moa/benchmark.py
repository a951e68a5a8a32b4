"""Mixture-of-Agents: accuracy and latency of each of its parts (Faster-MoA §5), and staircases.

By default on the family of three trained models that comes with FlashMoA, and on questions that
its training held out. Latency is that of one question at a time, accuracy that of many at once,
as the paper has it.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path

import anyio
from rich.console import Console

from flashmoa.engine import EngineClient
from flashmoa.moa import (
    AggregationPrompt,
    EarlyExit,
    Embedder,
    EngineEmbedder,
    LocalEmbedder,
    MixtureFailed,
    Schedule,
)
from flashmoa_bench.datasets import NAMES, Item, load
from flashmoa_bench.family import SHIPPED, SIZES
from flashmoa_bench.family.prompts import AGGREGATION
from flashmoa_bench.family.questions import family_items
from flashmoa_bench.harness.command_line import command_line, positive
from flashmoa_bench.harness.engines import Engines, Role, connected
from flashmoa_bench.harness.report import Report, progress, terminal
from flashmoa_bench.harness.rounds import alternating
from flashmoa_bench.moa.scores import Answered, summarise
from flashmoa_bench.moa.tables import show
from flashmoa_bench.moa.ways import WAYS, Competition, MixtureOutcome, MixtureWay

# Without, SGLang does not say what of a prompt was cached.
_TELLING = ("--enable-cache-report",)
# Two of them share a core: engines sleep while they have nothing to do.
_WITH_PLUGIN = tuple(
    Role(size, plugin=True, arguments=_TELLING, core=core)
    for size, core in zip(SIZES, (0, 0, 1), strict=True)
)
ROLES = (
    *_WITH_PLUGIN,
    *(
        replace(role, name=f"stock_{role.name}", plugin=False, optional=True)
        for role in _WITH_PLUGIN
    ),
)
_FAMILY = "family"
# Several questions at once have room for all of their agents.
_POOL = 60_000
_BASE: MixtureWay = "all-to-all"
_BASE_FIRST: MixtureWay = "one layer"


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench moa``; return the exit status."""
    parser = command_line("moa", __doc__, ROLES)
    _add_questions(parser)
    _add_agents(parser)
    chosen = parser.parse_args(arguments)
    if (chosen.dataset == _FAMILY) == (chosen.file is not None):
        parser.error(f"--dataset {' or '.join(NAMES)} needs its --file; {_FAMILY} has none")
    anyio.run(_main, chosen)
    return 0


def _add_questions(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("questions")
    group.add_argument("--dataset", choices=(_FAMILY, *NAMES), default=_FAMILY)
    group.add_argument("--file", type=Path, help="the dataset, JSONL or Parquet as published")
    group.add_argument(
        "--questions", type=positive, default=100, metavar="N", help="of each group, for accuracy"
    )
    group.add_argument(
        "--timed", type=positive, default=10, metavar="N", help="of each group, one at a time"
    )
    group.add_argument(
        "--concurrency", type=positive, default=8, metavar="N", help="questions, for accuracy"
    )


def _add_agents(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("agents")
    ways = tuple(WAYS)
    group.add_argument("--ways", nargs="+", choices=ways, default=list(ways), metavar="WAY")
    models = group.add_mutually_exclusive_group()
    models.add_argument(
        "--models", type=Path, default=SHIPPED, help="a folder with small, medium and large"
    )
    models.add_argument(
        "--shapes",
        nargs=3,
        metavar="SHAPE",
        help="of tiny models with random weights instead, whose answers all have --tokens tokens: "
        "for latency alone",
    )
    for size in SIZES:
        group.add_argument(
            f"--{size}-model", default="default", metavar="NAME", help="as its engines serve it"
        )
    group.add_argument("--tokens", type=positive, default=96, help="an agent writes at most")
    group.add_argument(
        "--temperature", type=float, default=0.8, help="of all agents but the last (0 there)"
    )
    group.add_argument("--layout", choices=("question-first", "answers-first"))
    group.add_argument(
        "--first-chunk",
        type=positive,
        metavar="TOKENS",
        help=f"of staircases, 4 characters each (8; {_FAMILY}: 2, since its answers are short)",
    )
    group.add_argument("--embedding-url", metavar="URL", help="an engine for early exit")
    group.add_argument("--tau", type=float, default=0.7, help="of early exit")
    group.add_argument("--min-answers", type=positive, default=2, help="of early exit")
    group.add_argument(
        "--threshold",
        type=float,
        help="of early exit: leave where Q is at least that, not by chance; 0 always leaves",
    )


def _roles(arguments: argparse.Namespace) -> list[Role]:
    """Return the roles with the models that engines started here serve."""
    shapes: list[str] | None = arguments.shapes
    served = {
        size: {"shape": shapes[place]} if shapes else {"model": arguments.models / size}
        for place, size in enumerate(SIZES)
    }
    return [replace(role, **served[role.name.removeprefix("stock_")]) for role in ROLES]


async def _main(arguments: argparse.Namespace) -> None:
    console = terminal()
    report = Report("moa", arguments)
    async with (
        connected(_roles(arguments), arguments, _POOL, console) as engines,
        AsyncExitStack() as stack,
    ):
        told = await report.describe(engines)
        report.head(console)
        reporting = {one["url"] for one in told.values() if one.get("enable_cache_report")}
        embedder = await _embedder(arguments, stack)
        competition = _contest(engines, arguments, embedder, reporting)
        ways: list[MixtureWay] = [way for way in competition.ways if way in arguments.ways]
        items = _items(arguments)
        few = list(_some(items, arguments.timed))
        timed = await _time(competition, ways, few, console)
        # What random weights say has no score.
        scored = None
        if not arguments.shapes:
            scored = await _score(competition, ways, items, arguments.concurrency, console)
    rows = summarise(timed, scored, _BASE, _BASE_FIRST)
    show(rows, console)
    report.save(console, {"questions": len(items), "rows": [asdict(row) for row in rows]})


async def _embedder(arguments: argparse.Namespace, stack: AsyncExitStack) -> Embedder:
    if arguments.embedding_url is None:
        return LocalEmbedder()
    engine = EngineClient(arguments.embedding_url)
    return EngineEmbedder(await stack.enter_async_context(engine))


def _contest(
    engines: Engines, arguments: argparse.Namespace, embedder: Embedder, reporting: set[str]
) -> Competition:
    stock = {size: f"stock_{size}" for size in SIZES}
    has_stock = all(name in engines for name in stock.values())
    length = {"max_tokens": arguments.tokens}
    if arguments.shapes:
        length["ignore_eos"] = True
    family = arguments.dataset == _FAMILY and not arguments.shapes
    return Competition(
        engines={size: engines[size] for size in SIZES},
        stock={size: engines[name] for size, name in stock.items()} if has_stock else {},
        models={size: getattr(arguments, f"{size}_model") for size in SIZES},
        reporting=reporting,
        prompts=AGGREGATION.__getitem__ if family else AggregationPrompt,
        layout=arguments.layout or "question-first",
        schedule=Schedule(arguments.first_chunk or (2 if family else 8)),
        early_exit=_early_exit(embedder, arguments),
        proposing=length | {"temperature": arguments.temperature},
        final=length | {"temperature": 0},
    )


def _early_exit(embedder: Embedder, arguments: argparse.Namespace) -> EarlyExit:
    policy = EarlyExit(
        embedder, tau=arguments.tau, min_answers=arguments.min_answers, seed=arguments.seed
    )
    if arguments.threshold is None:
        return policy
    return replace(policy, rule="threshold", threshold=arguments.threshold)


def _items(arguments: argparse.Namespace) -> list[Item]:
    """Return at most so many questions of each group, drawn by the seed."""
    if arguments.dataset == _FAMILY:
        return family_items(arguments.questions, arguments.seed)
    items = load(arguments.dataset, arguments.file)
    random.Random(arguments.seed).shuffle(items)
    return list(_some(items, arguments.questions))


def _some(items: Iterable[Item], count: int) -> Iterable[Item]:
    """Return the first so many of each group."""
    seen: defaultdict[str, int] = defaultdict(int)
    for item in items:
        seen[item.group] += 1
        if seen[item.group] <= count:
            yield item


async def _time(
    competition: Competition, ways: Sequence[MixtureWay], items: Sequence[Item], console: Console
) -> dict[MixtureWay, list[Answered]]:
    """Ask one question at a time, on empty caches, in every way before the next one."""
    found: dict[MixtureWay, list[Answered]] = {way: [] for way in ways}
    for way in ways:  # A round that is not counted.
        await _answer(competition, way, items[0])
    with progress(console) as bars:
        bar = bars.add_task("one at a time", total=len(items) * len(ways))
        for turn, way in enumerate(alternating(len(items), ways)):
            item = items[turn // len(ways)]
            await competition.flush()
            found[way].append(_graded(item, await _answer(competition, way, item)))
            bars.advance(bar)
    return found


async def _score(
    competition: Competition,
    ways: Sequence[MixtureWay],
    items: Sequence[Item],
    concurrency: int,
    console: Console,
) -> dict[MixtureWay, list[Answered]]:
    """Ask several questions at once, for their scores; their times do not count."""
    found: dict[MixtureWay, list[Answered]] = {}
    places = anyio.CapacityLimiter(concurrency)
    with progress(console) as bars:
        bar = bars.add_task("many at once", total=len(items) * len(ways))

        async def answer(
            way: MixtureWay, item: Item, outcomes: dict[str, MixtureOutcome | None]
        ) -> None:
            async with places:
                outcomes[item.id] = await _answer(competition, way, item)
                bars.advance(bar)

        for way in ways:
            outcomes: dict[str, MixtureOutcome | None] = {}
            async with anyio.create_task_group() as group:
                for item in items:
                    group.start_soon(answer, way, item, outcomes)
            # Only now: comparing two formulas may take seconds.
            found[way] = [_graded(item, outcomes[item.id]) for item in items]
    return found


async def _answer(competition: Competition, way: MixtureWay, item: Item) -> MixtureOutcome | None:
    try:
        return await competition.ask(way, item.question)
    except MixtureFailed:
        return None


def _graded(item: Item, outcome: MixtureOutcome | None) -> Answered:
    """Score an answer.

    This is done in the main thread, where Math-Verify can stop a comparison that is too slow.
    """
    score = item.score(outcome.text) if outcome is not None else 0.0
    return Answered(item.id, item.group, score, outcome)
