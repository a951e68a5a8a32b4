r"""Measure how accurate mixtures and staircases of real models are, beside each model alone.

The questions are GSM8K's (``test.jsonl`` of github.com/openai/grade-school-math). Nothing is
downloaded; give the file. An answer is right if its number is: the one in the last ``\boxed{}``,
otherwise after the last "####" or "answer is", otherwise the last one. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

from flashmoa.engine import EngineClient
from flashmoa.moa import (
    AggregationPrompt,
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
from flashmoa_bench.moa.latency_ways import LatencyWay, make_ways
from flashmoa_bench.recorded import SIZES

_LARGE = SIZES[-1]
_STAIRCASE = "staircase"
# Overlap and deciding do not change a text.
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
    """A question with the form that its answer should have, and the right number."""

    text: str
    known: Fraction


@dataclass(frozen=True, slots=True)
class WayRow:
    """The figures of one way, as shares of the questions.

    Attributes:
        error: standard error of ``accuracy``.
        gain: by how much it is more accurate than the large model, on the same questions; ``None``
            if that was not asked.
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
    # The pool has room for all agents of several questions.
    roles = [replace(role, model=folder) for role, folder in zip(ROLES, folders, strict=False)]
    async with (
        report.connect(roles, 60_000) as engines,
        # Without its URL it is never asked.
        EngineClient(options.embedding_url or "http://localhost") as embedding,
    ):
        ask = _Asker(_by_size(engines, options), EngineEmbedder(embedding), options)
        texts: dict[str, list[str | None]] = {}
        with progress_bar(report.console) as bars:
            bar = bars.add_task("", total=len(ways))
            for way in ways:
                bars.update(bar, description=way)
                run = partial(ask, way)
                texts[way] = await run_concurrently(run, questions, options.concurrency)
                bars.advance(bar)
    rows = summarise(questions, texts)
    report.show("Right answers", rows)
    report.save({"questions": len(questions), "rows": rows})


def _by_size(engines: Engines, options: argparse.Namespace) -> dict[str, tuple[EngineClient, str]]:
    """Return the engine of each size, and its model's name; a size without one has the last's."""
    found: dict[str, tuple[EngineClient, str]] = {}
    name = SIZES[0]
    for size in SIZES:
        name = size if size in engines else name
        found[size] = engines[name], getattr(options, f"{name}_model")
    return found


def read(file: Path) -> list[Question]:
    """Read the questions of GSM8K.

    Raises: ValueError if a line is not in the published form.
    """
    questions: list[Question] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row: dict[str, str] = json.loads(line)
            question, (_, mark, known) = row["question"], row["answer"].rpartition("####")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}, line {number}: not a question and an answer") from error
        if not mark or (value := find_number(known)) is None:
            raise ValueError(
                f"{file}, line {number}: its answer does not end with #### and a number"
            )
        questions.append(Question(f"{question}\n\n{_FORM}", value))
    if not questions:
        raise ValueError(f"{file} has no questions")
    return questions


def find_number(answer: str) -> Fraction | None:
    """Return the number that an answer gives as its result; ``None`` if it gives none."""
    marked = _MARKS.split(answer.rpartition("</think>")[2])
    numbers = _NUMBER.findall(marked[-1])
    if not numbers:
        return None
    return Fraction(numbers[0 if len(marked) > 1 else -1].replace(",", ""))


@dataclass(frozen=True, slots=True)
class _Asker:
    """Asks questions, with the engine of each size and the name of its model."""

    engines: Mapping[str, tuple[EngineClient, str]]
    embedder: EngineEmbedder
    options: argparse.Namespace

    async def __call__(self, way: str, question: Question) -> str | None:
        """Return the answer in one way; ``None`` if a mixture has none."""
        if way in SIZES:
            return await self._ask_model(self._model(way, 0), question.text)
        try:
            if way == _STAIRCASE:
                return await self._ask_staircase(question.text)
            return await self._ask_mixture(_MIXTURES[way], question.text)
        except MixtureFailed:
            return None

    def _model(self, size: str, temperature: float) -> Model:
        engine, name = self.engines[size]
        sampling = {"max_tokens": self.options.tokens, "temperature": temperature}
        return Model(engine, name, sampling)

    async def _ask_model(self, model: Model, question: str) -> str:
        async with Workflow(model.engine, ahead="nothing") as flow:
            messages = [{"role": "user", "content": question}]
            return await flow.ask(messages, model=model.model, **model.sampling)

    async def _ask_staircase(self, question: str) -> str:
        proposers = [self._model(size, self.options.temperature) for size in SIZES]
        result = await Staircase(proposers, self._model(_LARGE, 0)).answer(question)
        return result.text

    async def _ask_mixture(self, way: LatencyWay, question: str) -> str:
        *layers, last = way.sizes
        # Each question draws other random numbers.
        seed = self.options.seed + zlib.crc32(question.encode())
        mixture = MixtureOfAgents(
            [
                *(
                    [self._model(size, self.options.temperature) for size in each]
                    for each in layers
                ),
                [self._model(size, 0) for size in last],
            ],
            way.topology,
            prompt=AggregationPrompt("question-first"),
            early_exit=way.policy(EarlyExit(self.embedder, seed=seed)),
        )
        return (await mixture.answer(question)).text


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
    rows: list[WayRow] = []
    for way, own in scores.items():
        more = [a - b for a, b in zip(own, large, strict=True)] if large else []
        gain = fmean(more) if more else None
        failed = sum(text is None for text in texts[way])
        rows.append(WayRow(way, fmean(own), _error(own), gain, _error(more), failed))
    return rows


def _error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


_NEEDING = ", ".join(_WITH_EARLY_EXIT)
main = command(
    "moa_accuracy",
    __doc__,
    _measure,
    ROLES,
    (
        Option("file", Path, about="GSM8K's test.jsonl"),
        Option("--questions", positive, 100, "the most questions"),
        Option("--ways", str, list(WAYS), "by default all", choices=WAYS),
        Option("--model", Path, None, "up to three, from small to large, to start here", count="+"),
        *(Option(f"--{size}-model", str, "default", "name at its engine") for size in SIZES),
        Option("--embedding-url", str, None, f"engine with an embedding model, for {_NEEDING}"),
        Option("--tokens", positive, 1024, "most that an agent writes"),
        Option("--temperature", float, 0.8, "for all agents but the last (0)"),
        Option("--concurrency", positive, 8, "questions at once"),
    ),
    check=_check,
    repeats=False,
)
