"""The options of ``flashmoa bench moa``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from flashmoa_bench.datasets import NAMES
from flashmoa_bench.family import SHIPPED, SIZES
from flashmoa_bench.harness.command_line import positive
from flashmoa_bench.moa.ways import WAYS

# The models that come with FlashMoA, and the questions that they were trained for.
FAMILY = "family"


def add_questions(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which questions are asked, and how many."""
    group = parser.add_argument_group("questions")
    group.add_argument("--dataset", choices=(FAMILY, *NAMES), default=FAMILY)
    group.add_argument(
        "--accuracy",
        choices=NAMES,
        metavar="DATASET",
        help="score answers of real models (--engines or --models) to a dataset, and time nothing",
    )
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


def add_agents(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what the agents are, and how they answer."""
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
    models.add_argument(
        "--engines",
        nargs="+",
        metavar="SIZE=URL",
        help="running engines by size, or one URL for all; short for --small-url and so on",
    )
    for size in SIZES:
        group.add_argument(
            f"--{size}-model", default="default", metavar="NAME", help="name at its engines"
        )
    group.add_argument(
        "--tokens", type=positive, help=f"most that an agent writes (1024; the {FAMILY}: 96)"
    )
    group.add_argument(
        "--temperature", type=float, default=0.8, help="for all agents but the last (0)"
    )
    group.add_argument("--layout", choices=("question-first", "answers-first"))
    group.add_argument(
        "--first-chunk",
        type=positive,
        metavar="TOKENS",
        help=f"first chunk of staircases, 4 characters each (8; short answers of the {FAMILY}: 2)",
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


def engine_urls(engines: Sequence[str]) -> dict[str, str]:
    """Return the URLs of ``--engines``, by size.

    Raises: ValueError if not every size has one.
    """
    if len(engines) == 1 and "=" not in engines[0].partition("://")[0]:
        return dict.fromkeys(SIZES, engines[0])
    pairs = [engine.partition("=") for engine in engines]
    urls = {size: url for size, _, url in pairs}
    if set(urls) != set(SIZES):
        wanted = " ".join(f"{size}=URL" for size in SIZES)
        raise ValueError(f"--engines {' '.join(engines)}: give {wanted}, or one URL for all")
    return urls
