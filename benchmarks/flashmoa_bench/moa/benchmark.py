"""Measure accuracy and latency of Mixture-of-Agents' parts (Faster-MoA §5), and of staircases.

By default the models are the family of three trained models that comes with FlashMoA, and the
questions are held out from their training. As in the paper, latency is measured with one question
at a time, and accuracy with many at once.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import anyio
from rich.console import Console

from flashmoa.moa import (
    AggregationPrompt,
    EarlyExit,
    Embedder,
    MixtureFailed,
    Schedule,
)
from flashmoa_bench.datasets import NAMES, Item, load
from flashmoa_bench.family import SHIPPED, SIZES
from flashmoa_bench.family.prompts import AGGREGATION
from flashmoa_bench.family.questions import family_items
from flashmoa_bench.harness.command_line import make_parser, positive
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.report import Report, progress_bar
from flashmoa_bench.harness.rounds import alternate, run_concurrently
from flashmoa_bench.moa.embedding import make_embedder
from flashmoa_bench.moa.scores import ScoredAnswer, summarise
from flashmoa_bench.moa.tables import show
from flashmoa_bench.moa.ways import WAYS, MixtureOutcome, MixtureSetup, MixtureWay

# Without it, SGLang does not report how many prompt tokens were cached.
_CACHE_REPORT = ("--enable-cache-report",)
# Two engines share a core.
_WITH_PLUGIN = tuple(
    Role(size, plugin=True, arguments=_CACHE_REPORT, core=core)
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
# Tokens of KV, enough for all agents of several questions at once.
_POOL = 60_000
# The ways that latencies and times to the first token are compared with.
_BASE: MixtureWay = "all-to-all"
_BASE_FIRST: MixtureWay = "one layer"


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench moa`` and return the exit status."""
    parser = make_parser("moa", __doc__, ROLES)
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
        "--questions",
        type=positive,
        default=100,
        metavar="N",
        help="questions of each group, for accuracy",
    )
    group.add_argument(
        "--timed",
        type=positive,
        default=10,
        metavar="N",
        help="questions of each group, timed one by one",
    )
    group.add_argument(
        "--concurrency",
        type=positive,
        default=8,
        metavar="N",
        help="questions at once, for accuracy",
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
        help="tiny models with random weights instead, for latency alone; all answers then have "
        "--tokens tokens",
    )
    for size in SIZES:
        group.add_argument(
            f"--{size}-model", default="default", metavar="NAME", help="name at its engines"
        )
    group.add_argument("--tokens", type=positive, default=96, help="most that an agent writes")
    group.add_argument(
        "--temperature", type=float, default=0.8, help="for all agents but the last (0)"
    )
    group.add_argument("--layout", choices=("question-first", "answers-first"))
    group.add_argument(
        "--first-chunk",
        type=positive,
        metavar="TOKENS",
        help=f"first chunk of staircases, 4 characters each (8; short answers of the {_FAMILY}: 2)",
    )
    group.add_argument("--embedding-url", metavar="URL", help="an engine for early exit")
    group.add_argument("--tau", type=float, default=0.7, help="early exit: wanted similarity")
    group.add_argument(
        "--min-answers", type=positive, default=2, help="early exit: answers before it may leave"
    )
    group.add_argument(
        "--threshold",
        type=float,
        help="early exit: leave if Q is at least this, and not by chance; 0 always leaves",
    )


def _make_roles(arguments: argparse.Namespace) -> list[Role]:
    """Return the roles with the models that engines started here serve."""
    shapes: list[str] | None = arguments.shapes
    models = {
        size: {"shape": shapes[place]} if shapes else {"model": arguments.models / size}
        for place, size in enumerate(SIZES)
    }
    return [replace(role, **models[role.name.removeprefix("stock_")]) for role in ROLES]


async def _main(arguments: argparse.Namespace) -> None:
    report = Report("moa", arguments)
    async with (
        report.connect(_make_roles(arguments), _POOL) as engines,
        AsyncExitStack() as stack,
    ):
        reporting: set[str] = {
            each["url"] for each in report.engines.values() if each.get("enable_cache_report")
        }
        embedder = await make_embedder(arguments, stack)
        setup = _make_setup(engines, arguments, embedder, reporting)
        ways: list[MixtureWay] = [way for way in setup.ways if way in arguments.ways]
        items = _load_items(arguments)
        timed = await _time(setup, ways, list(_take(items, arguments.timed)), report.console)
        # The answers of models with random weights are not scored.
        scored = None
        if not arguments.shapes:
            scored = await _score(setup, ways, items, arguments.concurrency, report.console)
    rows = summarise(timed, scored, _BASE, _BASE_FIRST)
    show(rows, report.console)
    report.save({"questions": len(items), "rows": [asdict(row) for row in rows]})


def _make_setup(
    engines: Engines, arguments: argparse.Namespace, embedder: Embedder, reporting: set[str]
) -> MixtureSetup:
    stock = {size: f"stock_{size}" for size in SIZES}
    has_stock = all(name in engines for name in stock.values())
    sampling = {"max_tokens": arguments.tokens}
    if arguments.shapes:
        sampling["ignore_eos"] = True
    is_family = arguments.dataset == _FAMILY and not arguments.shapes
    return MixtureSetup(
        engines={size: engines[size] for size in SIZES},
        stock={size: engines[name] for size, name in stock.items()} if has_stock else {},
        models={size: getattr(arguments, f"{size}_model") for size in SIZES},
        reporting=reporting,
        prompts=AGGREGATION.__getitem__ if is_family else AggregationPrompt,
        layout=arguments.layout or "question-first",
        schedule=Schedule(arguments.first_chunk or (2 if is_family else 8)),
        early_exit=_make_early_exit(embedder, arguments),
        proposing=sampling | {"temperature": arguments.temperature},
        final=sampling | {"temperature": 0},
    )


def _make_early_exit(embedder: Embedder, arguments: argparse.Namespace) -> EarlyExit:
    policy = EarlyExit(
        embedder, tau=arguments.tau, min_answers=arguments.min_answers, seed=arguments.seed
    )
    if arguments.threshold is None:
        return policy
    return replace(policy, rule="threshold", threshold=arguments.threshold)


def _load_items(arguments: argparse.Namespace) -> list[Item]:
    """Return at most ``--questions`` questions of each group, drawn by the seed."""
    if arguments.dataset == _FAMILY:
        return family_items(arguments.questions, arguments.seed)
    items = load(arguments.dataset, arguments.file)
    random.Random(arguments.seed).shuffle(items)
    return list(_take(items, arguments.questions))


def _take(items: Iterable[Item], count: int) -> Iterable[Item]:
    """Yield the first ``count`` items of each group."""
    seen: defaultdict[str, int] = defaultdict(int)
    for item in items:
        seen[item.group] += 1
        if seen[item.group] <= count:
            yield item


async def _time(
    setup: MixtureSetup, ways: Sequence[MixtureWay], items: Sequence[Item], console: Console
) -> dict[MixtureWay, list[ScoredAnswer]]:
    """Ask one question at a time, on empty caches, in every way before the next one."""
    answers: dict[MixtureWay, list[ScoredAnswer]] = {way: [] for way in ways}
    for way in ways:  # This round is not counted.
        await _answer(setup, way, items[0])
    with progress_bar(console) as bars:
        bar = bars.add_task("one at a time", total=len(items) * len(ways))
        for turn, way in enumerate(alternate(len(items), ways)):
            item = items[turn // len(ways)]
            await setup.flush()
            answers[way].append(_grade(item, await _answer(setup, way, item)))
            bars.advance(bar)
    return answers


async def _score(
    setup: MixtureSetup,
    ways: Sequence[MixtureWay],
    items: Sequence[Item],
    concurrency: int,
    console: Console,
) -> dict[MixtureWay, list[ScoredAnswer]]:
    """Ask several questions at once, for their scores; their times do not count."""
    answers: dict[MixtureWay, list[ScoredAnswer]] = {}
    with progress_bar(console) as bars:
        bar = bars.add_task("many at once", total=len(items) * len(ways))

        async def answer(way: MixtureWay, item: Item) -> MixtureOutcome | None:
            outcome = await _answer(setup, way, item)
            bars.advance(bar)
            return outcome

        for way in ways:
            outcomes = await run_concurrently(partial(answer, way), items, concurrency)
            # Grading may take seconds for two formulas, so that it waits until no model writes.
            answers[way] = [_grade(*pair) for pair in zip(items, outcomes, strict=True)]
    return answers


async def _answer(setup: MixtureSetup, way: MixtureWay, item: Item) -> MixtureOutcome | None:
    """Return the outcome of a question; ``None`` if the mixture failed."""
    try:
        return await setup.ask(way, item.question)
    except MixtureFailed:
        return None


def _grade(item: Item, outcome: MixtureOutcome | None) -> ScoredAnswer:
    """Score an answer, in the main thread: only there can Math-Verify stop a slow comparison."""
    score = item.score(outcome.text) if outcome is not None else 0.0
    return ScoredAnswer(item.id, item.group, score, outcome)
