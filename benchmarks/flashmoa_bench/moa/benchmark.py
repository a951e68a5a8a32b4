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
from flashmoa_bench.family import AGGREGATOR, SHIPPED, SIZES
from flashmoa_bench.family.prompts import AGGREGATION
from flashmoa_bench.family.questions import family_items
from flashmoa_bench.harness.command_line import make_parser
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.report import Report, progress_bar
from flashmoa_bench.harness.rounds import alternate, run_concurrently
from flashmoa_bench.moa.embedding import make_embedder
from flashmoa_bench.moa.options import FAMILY, add_agents, add_questions, engine_urls
from flashmoa_bench.moa.scores import ScoredAnswer, gains, summarise
from flashmoa_bench.moa.tables import show, show_gains
from flashmoa_bench.moa.ways import MixtureOutcome, MixtureSetup, MixtureWay

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
# Tokens of KV, enough for all agents of several questions at once.
_POOL = 60_000
# The ways that latencies and times to the first token are compared with.
_BASE: MixtureWay = "all-to-all"
_BASE_FIRST: MixtureWay = "one layer"

Answers = dict[MixtureWay, list[ScoredAnswer]]


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench moa`` and return the exit status."""
    parser = make_parser("moa", __doc__, ROLES)
    add_questions(parser)
    add_agents(parser)
    chosen = parser.parse_args(arguments)
    chosen.dataset = chosen.accuracy or chosen.dataset
    if (chosen.dataset == FAMILY) == (chosen.file is not None):
        parser.error(f"--dataset {' or '.join(NAMES)} needs its --file; {FAMILY} has none")
    if chosen.engines:
        try:
            urls = engine_urls(chosen.engines)
        except ValueError as error:
            parser.error(str(error))
        for size, url in urls.items():
            setattr(chosen, f"{size}_url", url)
    if chosen.accuracy and (chosen.shapes or not (chosen.large_url or chosen.models != SHIPPED)):
        parser.error("--accuracy needs real models: give --engines, or --models FOLDER")
    if chosen.tokens is None:
        chosen.tokens = 96 if chosen.dataset == FAMILY else 1024
    anyio.run(_main, chosen)
    return 0


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
        timed: Answers = {way: [] for way in ways}
        if not arguments.accuracy:
            timed = await _time(setup, ways, list(_take(items, arguments.timed)), report.console)
        # The answers of models with random weights are not scored.
        scored: Answers | None = None
        if not arguments.shapes:
            scored = await _score(setup, ways, items, arguments.concurrency, report.console)
    rows = summarise(timed, scored, _BASE, _BASE_FIRST)
    show(rows, report.console)
    over = gains(scored or {}, AGGREGATOR)
    show_gains(over, AGGREGATOR, report.console)
    report.save(
        {
            "questions": len(items),
            "rows": [asdict(row) for row in rows],
            f"over_{AGGREGATOR}": [asdict(gain) for gain in over],
        }
    )


def _make_setup(
    engines: Engines, arguments: argparse.Namespace, embedder: Embedder, reporting: set[str]
) -> MixtureSetup:
    stock = {size: f"stock_{size}" for size in SIZES}
    has_stock = all(name in engines for name in stock.values())
    stock_engines = {size: engines[name] for size, name in stock.items()} if has_stock else {}
    if arguments.accuracy and not has_stock:
        # Texts do not depend on the plugin.
        stock_engines = {size: engines[size] for size in SIZES}
    sampling = {"max_tokens": arguments.tokens}
    if arguments.shapes:
        sampling["ignore_eos"] = True
    is_family = arguments.dataset == FAMILY and not arguments.shapes
    return MixtureSetup(
        engines={size: engines[size] for size in SIZES},
        stock=stock_engines,
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
    if arguments.dataset == FAMILY:
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
) -> Answers:
    """Ask one question at a time, on empty caches, in every way before the next one."""
    answers: Answers = {way: [] for way in ways}
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
) -> Answers:
    """Ask several questions at once, for their scores; their times do not count."""
    answers: Answers = {}
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
