"""Answer questions with mixtures and staircases of real models, and with each model alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from flashmoa.engine import EngineClient
from flashmoa.moa import (
    EarlyExit,
    EngineEmbedder,
    MixtureFailed,
    MixtureOfAgents,
    Model,
    Staircase,
    Steps,
)
from flashmoa.moa.settings import Order
from flashmoa.workflow import Workflow
from flashmoa_bench.harness.command_line import Option, positive
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.report import Report, progress_bar
from flashmoa_bench.harness.rounds import run_concurrently
from flashmoa_bench.moa.latency import BASE, LatencyWay, make_ways
from flashmoa_bench.recorded import SIZES

*_, LARGE = SIZES
# Overlap and decisions without exits change no text.
_MIXTURES = {
    way.name: way
    for way in (
        *make_ways(LARGE),
        LatencyWay("one layer", "3-1", (SIZES, [LARGE]), plugin=True),
    )
    if way.name not in ("tree + overlap", "undecided")
}
_STAIRCASES: dict[str, Order] = {
    "staircase": "contiguous",
    "staircase, prefix-cached": "prefix-cached",
}
WAYS = (*SIZES, *_MIXTURES, *_STAIRCASES)
ALL_TO_ALL = BASE
WITH_EARLY_EXIT = [name for name, way in _MIXTURES.items() if way.early_exit]
ROLES = [
    Role(size, plugin=True, optional=size != SIZES[0], core=core)
    for size, core in zip(SIZES, (0, 0, 1), strict=True)
]


def lacks_models(options: argparse.Namespace) -> str | None:
    """Return what is wrong if the options name neither engines nor models."""
    if not options.small_url and not 0 < len(options.model or ()) <= len(SIZES):
        return "this needs real models: give --small-url, or --model and 1 to 3 folders"
    return None


async def answer_all(
    report: Report, ways: Sequence[str], texts: Sequence[str]
) -> dict[str, list[str | None]]:
    """Return each way's answers to the texts; ``None`` for an answer that failed.

    Ways with early exit are left out without ``--embedding-url``.
    """
    options = report.options
    ways = [way for way in ways if options.embedding_url or way not in WITH_EARLY_EXIT]
    folders: Sequence[Path | None] = options.model or [None] * len(SIZES)
    roles = [replace(role, model=folder) for role, folder in zip(ROLES, folders, strict=False)]
    questions = [*enumerate(texts)]
    answers: dict[str, list[str | None]] = {}
    async with (
        report.connect(roles, 60_000) as engines,  # Room for all agents of several questions.
        # Without --embedding-url, nothing asks this client.
        EngineClient(options.embedding_url or "http://localhost") as embedding,
    ):
        with progress_bar(report.console) as bars:
            bar = bars.add_task("", total=len(ways))
            for way in ways:
                bars.update(bar, description=way)
                ask = partial(_ask, way, engines, EngineEmbedder(embedding), options)
                answers[way] = await run_concurrently(ask, questions, options.concurrency)
                bars.advance(bar)
    return answers


async def _ask(
    way: str,
    engines: Engines,
    embedder: EngineEmbedder,
    options: argparse.Namespace,
    question: tuple[int, str],
) -> str | None:
    """Return the answer to a numbered text in one way; ``None`` if a mixture fails."""
    number, text = question

    def model(size: str, temperature: float = options.temperature) -> Model:
        # A size without an engine takes the next smaller size's engine.
        smaller = SIZES[: SIZES.index(size) + 1]
        engine = engines[next(each for each in reversed(smaller) if each in engines)]
        sampling = {"max_tokens": options.tokens, "temperature": temperature}
        return Model(engine, getattr(options, f"{size}_model"), sampling)

    if way in SIZES:
        alone = model(way, 0)
        async with Workflow(alone.engine, ahead="nothing") as flow:
            messages = [{"role": "user", "content": text}]
            return await flow.ask(messages, model=alone.model, **alone.sampling)
    if way in _STAIRCASES:
        steps = Steps(order=_STAIRCASES[way])
        system = Staircase([model(size) for size in SIZES], model(LARGE, 0), steps=steps)
    else:
        mixture = _MIXTURES[way]
        *layers, [last] = mixture.sizes
        system = MixtureOfAgents(
            [*([model(size) for size in each] for each in layers), [model(last, 0)]],
            mixture.topology,
            early_exit=mixture.policy(EarlyExit(embedder, seed=options.seed + number)),
        )
    try:
        return (await system.answer(text)).text
    except MixtureFailed:
        return None


OPTIONS = (
    Option("--questions", positive, 100, "the most questions"),
    Option("--model", Path, None, "up to three, from small to large, to start here", count="+"),
    *(Option(f"--{size}-model", str, "default", "name at its engine") for size in SIZES),
    Option(
        "--embedding-url",
        str,
        None,
        f"engine with an embedding model, for {', '.join(WITH_EARLY_EXIT)}",
    ),
    Option("--tokens", positive, 1024, "most that an agent writes"),
    Option("--temperature", float, 0.8, "for all agents but the last (0)"),
    Option("--concurrency", positive, 8, "questions at once"),
)
