"""Provide the engines that the examples ask, yours or some on this CPU, and print timelines."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from smollm2 import MODELS, smollm2_engines

from flashmoa.engine.local import tiny_engines
from flashmoa.observe import Event
from flashmoa.observe.timeline import draw, lanes

_HERE = Path(__file__).parent
GUIDE = _HERE / "guides" / "nepal.md"
PAPER = _HERE / "papers" / "handoffs.md"


def run_program(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``main``; if it is interrupted, stop its engines and exit without a traceback."""
    try:
        anyio.run(main)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def one_engine_arguments(about: str | None) -> argparse.Namespace:
    """Parse ``--engine`` and ``--model``."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--engine", help="URL of a running engine, http://HOST:PORT")
    parser.add_argument("--model", default="tiny", help="name by which the engine serves it")
    return parser.parse_args()


@asynccontextmanager
async def one_engine(url: str | None) -> AsyncGenerator[str]:
    """Yield the given URL, or start an engine with a tiny model and yield its URL."""
    if url is not None:
        yield url
        return
    print("Starting an SGLang engine on this CPU with a tiny, untrained model ...")
    async with tiny_engines(["small"], [GUIDE], MODELS) as (engine,):
        yield engine.url


def two_engine_parser(about: str | None, tokens: int) -> argparse.ArgumentParser:
    """Make a parser for two engines and their models; ``tokens`` is the default of ``--tokens``."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--engine-a", metavar="URL", help="engine of the smaller model")
    parser.add_argument("--engine-b", metavar="URL", help="engine of the larger model")
    parser.add_argument("--model-a", default="small", help="name at engine A")
    parser.add_argument("--model-b", default="large", help="name at engine B")
    parser.add_argument("--tokens", type=int, default=tokens, help="number that each agent writes")
    parser.add_argument("--cache", type=Path, default=MODELS.parent, help="for tiny models")
    return parser


@asynccontextmanager
async def two_engines(
    arguments: argparse.Namespace, text: Path, console: Console, *, real: bool = False
) -> AsyncGenerator[tuple[str, str]]:
    """Yield the given URLs, or start two engines, one per core, and yield their URLs.

    Args:
        arguments: command line, parsed by :func:`two_engine_parser`.
        text: file to train the tiny models' tokenizer on.
        real: whether both serve SmolLM2, which writes English, and no tiny models.

    Raises: ValueError if one URL is given without the other.
    """
    urls = (arguments.engine_a, arguments.engine_b)
    if bool(urls[0]) != bool(urls[1]):
        raise ValueError("give both --engine-a and --engine-b, or neither")
    if urls[0]:
        yield urls
        return
    console.print("Real SGLang on this CPU, two engines. They start in one to five minutes.")
    if not real:
        console.print(
            "The models are tiny and untrained: what they say is noise, the timing is real."
        )
    status = console.status("")
    status.start()
    try:
        models = arguments.cache / "models"
        engines = (
            smollm2_engines(2, models, status.update)
            if real
            else tiny_engines(["small", "large"], [text], models, status.update)
        )
        async with engines as (a, b):
            status.stop()
            console.print(f"engine A (core 0): {a.url}   engine B (core 1): {b.url}\n")
            yield a.url, b.url
    finally:
        status.stop()


def print_timeline(events: Sequence[Event], console: Console) -> None:
    """Print a chart of the agents' work over time."""
    console.print(draw(lanes(events), min(console.width, 110)), markup=False, highlight=False)
