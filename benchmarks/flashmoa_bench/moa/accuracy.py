"""Measure how accurate mixtures and staircases of real models are, beside each model alone.

The questions are a published set's: GSM8K, MATH-500, AIME25, MMLU-ProX-Lite or IFBench. Nothing is
downloaded; give the file (docs/benchmarks.md names each). Nothing is timed.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

from flashmoa_bench.harness.command_line import Option, command
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.moa.question_sets import SETS, Question, read
from flashmoa_bench.moa.ways import LARGE, OPTIONS, ROLES, WAYS, answer_all, lacks_models


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
    gain: Annotated[float | None, Column(f"over {LARGE}", "{:+.1%}")]
    gain_error: Annotated[float, Column("±", "{:.1%}")]
    failed: Annotated[int, Column("without an answer")]


def _check(options: argparse.Namespace) -> str | None:
    if problem := lacks_models(options):
        return problem
    try:
        read(options.file, options.set)
    except (OSError, ValueError) as error:
        return str(error)
    return None


async def _measure(report: Report) -> None:
    options = report.options
    questions = read(options.file, options.set)
    random.Random(options.seed).shuffle(questions)
    questions = questions[: options.questions]
    texts = await answer_all(report, options.ways, [question.text for question in questions])
    rows = summarise(questions, texts)
    report.show(f"Right answers of {options.set}", rows)
    report.save({"set": options.set, "questions": len(questions), "rows": rows})


def summarise(
    questions: Sequence[Question], texts: Mapping[str, Sequence[str | None]]
) -> list[WayRow]:
    """Return the figures of each way, given its answers in the order of the questions."""
    scores = {
        way: [
            float(question.is_right(text))
            for question, text in zip(questions, answers, strict=True)
        ]
        for way, answers in texts.items()
    }
    large = scores.get(LARGE)
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


main = command(
    "moa_accuracy",
    __doc__,
    _measure,
    ROLES,
    Option("file", Path, about="the set's file, with a JSON object in each line"),
    Option("--set", str, "gsm8k", "of questions", choices=tuple(SETS)),
    Option("--ways", str, list(WAYS), "by default all", choices=WAYS),
    *OPTIONS,
    check=_check,
    repeats=False,
)
