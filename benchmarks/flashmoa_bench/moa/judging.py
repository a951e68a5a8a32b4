"""Let a model judge the answers of mixtures and staircases, pair by pair, as Arena-Hard does.

Each way's answer to an open question is compared with the baseline's in both orders, since judges
prefer a place. The judge first answers itself. A verdict "much better" counts three times. Nothing
is downloaded; give a file with a JSON object in each line, whose question is ``prompt``
(Arena-Hard 2), ``turns`` (Arena-Hard 0.1) or ``instruction`` (AlpacaEval). The judge's own taste is
in every figure: take a model that is stronger than all agents, and that is no agent.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from flashmoa.engine import EngineClient
from flashmoa.errors import RequestRefused
from flashmoa.workflow import Workflow
from flashmoa_bench.harness.command_line import Option, command, positive
from flashmoa_bench.harness.report import Column, Report, progress_bar
from flashmoa_bench.harness.rounds import run_concurrently
from flashmoa_bench.moa.question_sets import Row, read_rows
from flashmoa_bench.moa.ways import (
    ALL_TO_ALL,
    OPTIONS,
    ROLES,
    WAYS,
    WITH_EARLY_EXIT,
    answer_all,
    lacks_models,
)

_INSTRUCTION = (
    "You are an impartial judge of two assistants' answers to a user's prompt. First write your "
    "own answer to the prompt. Then compare both answers with it and with each other: find "
    "mistakes, and judge whether they are helpful, relevant and concise, and what is missing. "
    "Neither the order nor the length of the answers may decide. End with exactly one verdict:\n"
    "[[A>>B]] if A is much better, [[A>B]] if A is better, [[A=B]] if they are equally good, "
    "[[B>A]] if B is better, [[B>>A]] if B is much better."
)
_VERDICT = re.compile(r"\[\[([AB])(>>|>|=|<<|<)([AB])\]\]")
# Verdict on the first answer: its scores. A clear verdict has three times the weight.
_SCORES = {">>": [1.0] * 3, ">": [1.0], "=": [0.5], "<": [0.0], "<<": [0.0] * 3}
_MIRRORED = {">>": "<<", ">": "<", "=": "=", "<": ">", "<<": ">>"}
_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Pair:
    """A question with two answers. The judge sees ``first`` as A, and ``second`` as B."""

    prompt: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """One way's figures against the baseline.

    Attributes:
        rate: share of wins, where a tie is half a win.
        low, high: interval that has 90 % of the bootstrapped rates.
        judged: number of questions with a verdict in both orders; only these count.
        failed: number of questions without an answer, which the judge sees as an empty one.
    """

    way: Annotated[str, Column("")]
    rate: Annotated[float, Column("wins", "{:.1%}")]
    low: Annotated[float, Column("from", "{:.1%}")]
    high: Annotated[float, Column("to", "{:.1%}")]
    judged: Annotated[int, Column("judged")]
    failed: Annotated[int, Column("without an answer")]


def _check(options: argparse.Namespace) -> str | None:
    if problem := lacks_models(options):
        return problem
    if not options.judge_url:
        return "this needs a judge: give --judge-url, an engine with a strong model"
    if options.baseline in WITH_EARLY_EXIT and not options.embedding_url:
        return f"--baseline {options.baseline!r} exits early, which needs --embedding-url"
    try:
        read_prompts(options.file)
    except (OSError, ValueError) as error:
        return str(error)
    return None


async def _measure(report: Report) -> None:
    options = report.options
    prompts = read_prompts(options.file)
    random.Random(options.seed).shuffle(prompts)
    prompts = prompts[: options.questions]
    ways = [options.baseline, *(way for way in options.ways if way != options.baseline)]
    answers = await answer_all(report, ways, prompts)
    base, *others = answers
    scores: dict[str, list[list[float]]] = {}
    async with EngineClient(options.judge_url) as judge:
        with progress_bar(report.console) as bars:
            bar = bars.add_task("", total=len(others))
            for way in others:
                bars.update(bar, description=f"judging {way}")
                pairs = make_pairs(prompts, answers[way], answers[base])
                ask = partial(_ask_judge, judge, options)
                verdicts = await run_concurrently(ask, pairs, options.concurrency)
                scores[way] = score(verdicts)
                bars.advance(bar)
    rows = summarise(scores, answers, options.seed)
    report.show(f"Wins over {base}", rows)
    report.save({"questions": len(prompts), "baseline": base, "rows": rows})


def read_prompts(file: Path) -> list[str]:
    """Read the questions of Arena-Hard or AlpacaEval. Raises: ValueError if a line has none."""
    prompts: list[str] = []
    for number, row in read_rows(file):
        prompt = _prompt(row)
        if not isinstance(prompt, str):
            raise ValueError(
                f"{file}, line {number}: no question: it needs prompt, turns or instruction"
            )
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{file} has no questions")
    return prompts


def _prompt(row: Row) -> object:
    match row:
        case {"prompt": prompt} | {"instruction": prompt} | {"turns": [{"content": prompt}, *_]}:
            return prompt
        case _:
            return None


def make_pairs(
    prompts: Sequence[str], own: Sequence[str | None], base: Sequence[str | None]
) -> list[Pair]:
    """Return two pairs for each question: the way's answer first, and the baseline's first."""
    pairs: list[Pair] = []
    for prompt, one, other in zip(prompts, own, base, strict=True):
        ours, theirs = ((each or "").rpartition("</think>")[2] for each in (one, other))
        pairs += [Pair(prompt, ours, theirs), Pair(prompt, theirs, ours)]
    return pairs


async def _ask_judge(judge: EngineClient, options: argparse.Namespace, pair: Pair) -> str:
    """Return the judge's text about a pair; none if its engine refuses it, such as a long one."""
    shown = (
        f"# User's prompt\n{pair.prompt}\n\n"
        f"# Answer of assistant A\n{pair.first}\n\n# Answer of assistant B\n{pair.second}"
    )
    messages = [{"role": "system", "content": _INSTRUCTION}, {"role": "user", "content": shown}]
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": options.judge_tokens}
    try:
        async with Workflow(judge, ahead="nothing") as flow:
            return await flow.ask(messages, model=options.judge_model, **sampling)
    except RequestRefused as error:
        if not error.blames_request:
            raise
        return ""


def find_verdict(text: str) -> str | None:
    """Return the last verdict on A over B, a key of the scores; ``None`` without one."""
    found = _VERDICT.findall(text.rpartition("</think>")[2])
    if not found or found[-1][0] == found[-1][2]:
        return None
    first, sign, _ = found[-1]
    return sign if first == "A" else _MIRRORED[sign]


def score(texts: Sequence[str]) -> list[list[float]]:
    """Return the way's scores for each question with two verdicts.

    Args: texts: the judge's texts about the pairs of :func:`make_pairs`.
    """
    scores: list[list[float]] = []
    for ours_first, theirs_first in zip(texts[::2], texts[1::2], strict=True):
        one, other = find_verdict(ours_first), find_verdict(theirs_first)
        if one is not None and other is not None:
            scores.append([*_SCORES[one], *_SCORES[_MIRRORED[other]]])
    return scores


def summarise(
    scores: Mapping[str, Sequence[Sequence[float]]],
    answers: Mapping[str, Sequence[str | None]],
    seed: int,
) -> list[JudgedRow]:
    """Return the figures of each way that has verdicts.

    Both verdicts on a question are drawn together, because they are about the same answers.
    """
    dice, rows = random.Random(seed), list[JudgedRow]()
    for way, own in scores.items():
        if not own:
            continue
        drawn = sorted(_rate(dice.choices(own, k=len(own))) for _ in range(_RESAMPLES))
        low, high = (drawn[round(share * (_RESAMPLES - 1))] for share in (0.05, 0.95))
        failed = sum(answer is None for answer in answers[way])
        rows.append(JudgedRow(way, _rate(own), low, high, len(own), failed))
    return rows


def _rate(scores: Sequence[Sequence[float]]) -> float:
    return fmean(each for question in scores for each in question)


main = command(
    "moa_judge",
    __doc__,
    _measure,
    ROLES,
    Option("file", Path, about="questions, with a JSON object in each line"),
    Option("--judge-url", str, None, "engine of the judge"),
    Option("--judge-model", str, "default", "name at its engine"),
    Option("--judge-tokens", positive, 4096, "most that the judge writes"),
    Option("--ways", str, list(WAYS), "by default all", choices=WAYS),
    Option("--baseline", str, ALL_TO_ALL, "way to compare with", choices=WAYS),
    *OPTIONS,
    check=_check,
    repeats=False,
)
