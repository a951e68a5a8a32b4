r"""Measure how accurate mixtures and staircases of real models are, beside each model alone.

The questions are GSM8K's (``test.jsonl`` of github.com/openai/grade-school-math). Nothing is
downloaded; give the file. An answer is right if its number is right: the number in the last
``\boxed{}``, otherwise after the last "####" or "answer is", otherwise the last number. Nothing is
timed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

from flashmoa.engine import EngineClient
from flashmoa.moa import (
    EarlyExit,
    EngineEmbedder,
    MixtureFailed,
    MixtureOfAgents,
    Model,
    Staircase,
)
from flashmoa.workflow import Workflow
from flashmoa_bench.harness.command_line import Option, command, positive
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.report import Column, Report, progress_bar
from flashmoa_bench.harness.rounds import run_concurrently
from flashmoa_bench.moa.latency import LatencyWay, make_ways
from flashmoa_bench.recorded import SIZES

*_, _LARGE = SIZES
_STAIRCASE = "staircase"
# Overlap and decisions without exits change no text.
_MIXTURES = {
    way.name: way
    for way in (
        *make_ways(_LARGE),
        LatencyWay("one layer", "3-1", (SIZES, [_LARGE]), plugin=True),
    )
    if way.name not in ("tree + overlap", "undecided")
}
WAYS = (*SIZES, *_MIXTURES, _STAIRCASE)
_WITH_EARLY_EXIT = [name for name, way in _MIXTURES.items() if way.early_exit]
ROLES = [
    Role(size, plugin=True, optional=size != SIZES[0], core=core)
    for size, core in zip(SIZES, (0, 0, 1), strict=True)
]
_FORM = "Think step by step, and put the final answer, a number, in \\boxed{}."
_MARKS = re.compile(r"\\boxed\s*\{|####|\banswer is\b", re.IGNORECASE)
# A repeating model may write thousands of digits, which int() would refuse.
_NUMBER = re.compile(r"(?<![\w.])-?[0-9][0-9,]{0,30}(?:\.[0-9]{1,30})?")


@dataclass(frozen=True, slots=True)
class Question:
    """A line's question with the wanted form of its answer, and the right number."""

    number: int
    text: str
    known: Fraction


@dataclass(frozen=True, slots=True)
class WayRow:
    """One way's figures, as shares of the questions.

    Attributes:
        error: standard error of ``accuracy``.
        gain: accuracy less the large model's on the same questions; ``None`` if that was not asked.
        gain_error: standard error of the differences.
        failed: number of questions without an answer, which count as wrong.
    """

    way: Annotated[str, Column("")]
    accuracy: Annotated[float, Column("accuracy", "{:.1%}")]
    error: Annotated[float, Column("±", "{:.1%}")]
    gain: Annotated[float | None, Column(f"over {_LARGE}", "{:+.1%}")]
    gain_error: Annotated[float, Column("±", "{:.1%}")]
    failed: Annotated[int, Column("without an answer")]


def _check(options: argparse.Namespace) -> str | None:
    if not options.small_url and not 0 < len(options.model or ()) <= len(SIZES):
        return "accuracy needs real models: give --small-url, or --model and 1 to 3 folders"
    return None


async def _measure(report: Report) -> None:
    options = report.options
    ways = [way for way in options.ways if options.embedding_url or way not in _WITH_EARLY_EXIT]
    questions = read(options.file)
    random.Random(options.seed).shuffle(questions)
    questions = questions[: options.questions]
    folders: Sequence[Path | None] = options.model or [None] * len(SIZES)
    roles = [replace(role, model=folder) for role, folder in zip(ROLES, folders, strict=False)]
    async with (
        report.connect(roles, 60_000) as engines,  # Room for all agents of several questions.
        # Without --embedding-url, nothing asks this client.
        EngineClient(options.embedding_url or "http://localhost") as embedding,
    ):
        texts: dict[str, list[str | None]] = {}
        with progress_bar(report.console) as bars:
            bar = bars.add_task("", total=len(ways))
            for way in ways:
                bars.update(bar, description=way)
                ask = partial(_ask, way, engines, EngineEmbedder(embedding), options)
                texts[way] = await run_concurrently(ask, questions, options.concurrency)
                bars.advance(bar)
    rows = summarise(questions, texts)
    report.show("Right answers", rows)
    report.save({"questions": len(questions), "rows": rows})


async def _ask(
    way: str,
    engines: Engines,
    embedder: EngineEmbedder,
    options: argparse.Namespace,
    question: Question,
) -> str | None:
    """Return the answer in one way; ``None`` if a mixture fails."""

    def model(size: str, temperature: float = options.temperature) -> Model:
        # A size without an engine takes the next smaller size's engine.
        smaller = SIZES[: SIZES.index(size) + 1]
        engine = engines[next(each for each in reversed(smaller) if each in engines)]
        sampling = {"max_tokens": options.tokens, "temperature": temperature}
        return Model(engine, getattr(options, f"{size}_model"), sampling)

    if way in SIZES:
        alone = model(way, 0)
        async with Workflow(alone.engine, ahead="nothing") as flow:
            messages = [{"role": "user", "content": question.text}]
            return await flow.ask(messages, model=alone.model, **alone.sampling)
    if way == _STAIRCASE:
        system = Staircase([model(size) for size in SIZES], model(_LARGE, 0))
    else:
        mixture = _MIXTURES[way]
        *layers, [last] = mixture.sizes
        system = MixtureOfAgents(
            [*([model(size) for size in each] for each in layers), [model(last, 0)]],
            mixture.topology,
            early_exit=mixture.policy(EarlyExit(embedder, seed=options.seed + question.number)),
        )
    try:
        return (await system.answer(question.text)).text
    except MixtureFailed:
        return None


def read(file: Path) -> list[Question]:
    """Read the questions of GSM8K.

    Raises: ValueError if a line is not in the published form.
    """
    questions: list[Question] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").strip().split("\n"), 1):
        try:
            row: dict[str, str] = json.loads(line)
            text, (_, mark, known) = row["question"], row["answer"].rpartition("####")
        except (ValueError, KeyError, TypeError, AttributeError):
            mark = text = known = ""
        if not mark or (value := find_number(known)) is None:
            raise ValueError(
                f"{file}, line {number}: not a question and an answer that ends with #### and a "
                "number"
            )
        questions.append(Question(number, f"{text}\n\n{_FORM}", value))
    return questions


def find_number(answer: str) -> Fraction | None:
    """Return the result of an answer; ``None`` without a number."""
    marked = _MARKS.split(answer.rpartition("</think>")[2])
    numbers = _NUMBER.findall(marked[-1])
    if not numbers:
        return None
    return Fraction(numbers[0 if len(marked) > 1 else -1].replace(",", ""))


def summarise(
    questions: Sequence[Question], texts: Mapping[str, Sequence[str | None]]
) -> list[WayRow]:
    """Return the figures of each way, given its answers in the order of the questions."""
    scores = {
        way: [
            float(text is not None and find_number(text) == question.known)
            for question, text in zip(questions, answers, strict=True)
        ]
        for way, answers in texts.items()
    }
    large = scores.get(_LARGE)
    return [
        WayRow(
            way,
            fmean(own),
            _error(own),
            fmean(own) - fmean(large) if large else None,
            _error([a - b for a, b in zip(own, large or own, strict=True)]),
            sum(text is None for text in texts[way]),
        )
        for way, own in scores.items()
    ]


def _error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


_NEEDING = ", ".join(_WITH_EARLY_EXIT)
main = command(
    "moa_accuracy",
    __doc__,
    _measure,
    ROLES,
    Option("file", Path, about="GSM8K's test.jsonl"),
    Option("--questions", positive, 100, "the most questions"),
    Option("--ways", str, list(WAYS), "by default all", choices=WAYS),
    Option("--model", Path, None, "up to three, from small to large, to start here", count="+"),
    *(Option(f"--{size}-model", str, "default", "name at its engine") for size in SIZES),
    Option("--embedding-url", str, None, f"engine with an embedding model, for {_NEEDING}"),
    Option("--tokens", positive, 1024, "most that an agent writes"),
    Option("--temperature", float, 0.8, "for all agents but the last (0)"),
    Option("--concurrency", positive, 8, "questions at once"),
    check=_check,
    repeats=False,
)
