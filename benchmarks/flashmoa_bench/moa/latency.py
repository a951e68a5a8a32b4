"""Measure how fast a Mixture-of-Agents of three models answers, part by part (Faster-MoA §5).

Meant for modelled GPUs, whose answers mean nothing: lengths and similarities are those of recorded
answers of real models (flashmoa_bench/recorded), and confidences are drawn. As in the paper, one
question is asked at a time. --computed asks no engines: it adds up the GPUs' cost tables.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Annotated, Any

from flashmoa_bench.harness.command_line import Option, command
from flashmoa_bench.harness.modelled_gpus import TOLERATED_SHARE
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.harness.rounds import Key, measure_cells, measured_cells
from flashmoa_bench.moa.latency_ways import BASE, Asker, LatencyAnswer, LatencyWay, make_ways
from flashmoa_bench.moa.least_times import compute, compute_answer, size_times, tabulated_times
from flashmoa_bench.moa.rig import (
    RIG_OPTIONS,
    SERVINGS,
    connect_rig,
    make_roles,
    make_script_options,
)
from flashmoa_bench.moa.script import QuestionScript, ScriptOptions, write_script
from flashmoa_bench.recorded import load_recorded, spread

# Options that may differ between a run and the one that it resumes.
_FREE_OPTIONS = ("ways", "questions", "computed")
# It has the shape of Qwen3-Embedding-4B. An embedding takes its prefill, on another GPU.
_EMBEDDING_MODEL = "Qwen/Qwen3-VL-4B-Instruct"
_WARM_UP = ScriptOptions(equal=4, prompt=(8, 8))


def _check(options: argparse.Namespace) -> str | None:
    if options.computed is not None and not options.device:
        return "--computed needs the --device whose cost tables to take"
    return None


async def _measure(report: Report) -> None:
    options = report.options
    ways = [way for way in make_ways() if way.name in options.ways]
    questions = spread(load_recorded()[options.answers].questions, options.questions)
    script_options = make_script_options(options)
    scripts = {
        way.name: [write_script(each, way.sizes, script_options) for each in questions]
        for way in ways
    }
    if options.computed is not None:
        _compute(ways, scripts, report)
        return
    cells = measured_cells(report, LatencyAnswer, _FREE_OPTIONS)
    # An answer that overran is measured again.
    found = {(c.way, c.question): c for c in cells if c.gpus.overrun <= TOLERATED_SHARE}
    todo = [
        (way, scripts[way.name][place])
        for place, turn in enumerate(_turns(ways, len(questions)))
        for way in turn
        if (way.name, questions[place].number) not in found
    ]
    if todo:
        await _ask_all(todo, found, report)
    times = size_times(options)
    chosen = [(way, script) for way in ways for script in scripts[way.name]]
    computed = {
        (way.name, script.question.number): compute_answer(
            way, script, times, options.serving, {}
        ).seconds
        for way, script in chosen
        if times and way.early_exit not in ("ours", "published")  # These decide by chance.
    }
    keys = [(way.name, script.question.number) for way, script in chosen]
    rows = summarise(ways, [found[key] for key in keys], computed)
    show(rows, report)
    if todo:
        report.save({"cells": list(found.values()), "rows": rows})


def _compute(
    ways: Sequence[LatencyWay], scripts: Mapping[str, Sequence[QuestionScript]], report: Report
) -> None:
    """Compute the ways without engines, and print and save what they take."""
    options = report.options
    report.print_head()
    times, policy = size_times(options), {**_policy(options), "seed": options.seed}
    rows = [
        row
        for serving in options.computed or [options.serving]
        for row in compute(ways, scripts, times, serving, policy)
    ]
    report.show(
        "Seconds of a question by the GPUs' cost tables, medians",
        rows,
        "  Nothing was run: forwards alone, without HTTP and scheduling. Overlap is perfect, and "
        "early exit decides in\n  no time. 2nd layer: mean of its agents, from the end of what "
        "they read. left out: share of the agents of a\n  layer and size. paper: Faster-MoA §5.3.",
    )
    report.save({"computed": rows})


async def _ask_all(
    todo: Sequence[tuple[LatencyWay, QuestionScript]],
    found: dict[Key, LatencyAnswer],
    report: Report,
) -> None:
    """Ask the questions, and write all that is found after each."""
    ways = {way.name: (way, script) for way, script in todo}
    plugin = any(way.plugin for way, _ in ways.values())
    stock = any(not way.plugin for way, _ in ways.values())
    options = report.options
    async with connect_rig(report, plugin=plugin, stock=stock) as rig:
        asker = Asker(rig, _policy(options), _embedding_seconds(options), options.seed)
        for way, script in ways.values():  # These answers do not count.
            await asker.ask(way, write_script(script.question, way.sizes, _WARM_UP))
        asks = {
            (way.name, script.question.number): partial(asker.ask, way, script)
            for way, script in todo
        }
        await measure_cells(asks, found, report)


def _turns(ways: Sequence[LatencyWay], questions: int) -> Iterator[list[LatencyWay]]:
    for place in range(questions):
        first = place % len(ways)
        yield [*ways[first:], *ways[:first]]


def _policy(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of :class:`EarlyExit` on the command line."""
    if arguments.threshold is None:
        return {}
    return {"rule": "threshold", "threshold": arguments.threshold}


def _embedding_seconds(arguments: argparse.Namespace) -> Callable[[int], float]:
    """Return what gives the seconds of one answer's embedding; 0 without ``--device``."""
    if not arguments.device:
        return lambda _tokens: 0.0
    times = tabulated_times(arguments.device, _EMBEDDING_MODEL)

    def seconds(tokens: int) -> float:
        return times.prefill(((0, tokens),))

    return seconds


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """The figures of one way; medians and means are over its questions.

    Attributes:
        seconds, first_token: medians, in seconds.
        relative: median of a question's seconds over those of the same question all-to-all.
        second, relative_second: mean seconds of the second layer's agents, and over all-to-all's.
        of_least: median share of a question's time in which the agents on its critical path decode.
        of_computed: median of what cost tables add up to over a question's seconds; ``None`` where
            they cannot (early exit), or there are none.
        computed, relative_computed: mean tokens that engines computed, and over all-to-all's.
        gpu_seconds: mean seconds of all GPUs' forwards.
        prompts: mean prompt tokens by layer and kind.
        left: share of agents that were left out, by layer and size.
        quality: mean Q of a decision.
        decision: mean seconds of a decision.
        deciding: mean share of a question's time by which decisions delayed it.
        overran: number of answers in which a GPU's forwards were computed too late.
    """

    way: Annotated[str, Column("")]
    questions: Annotated[int, Column("questions")]
    seconds: Annotated[float, Column("seconds", "{:.2f}")]
    relative: Annotated[float | None, Column("over", "{:+.0%}", less=1)]
    paper: Annotated[float | None, Column("paper", "{:+.0%}", less=1)]
    first_token: Annotated[float, Column("first token", "{:.2f}")]
    second: Annotated[float, Column("2nd layer", "{:.2f}")]
    relative_second: Annotated[float | None, Column("over", "{:+.0%}", less=1)]
    of_least: Annotated[float, Column("least", "{:.0%}")]
    of_computed: Annotated[float | None, Column("tables", "{:.0%}")]
    computed: Annotated[float | None, Column("computed", "{:.0f}")]
    relative_computed: Annotated[float | None, Column("over", "{:+.0%}", less=1)]
    gpu_seconds: Annotated[float, Column("GPU s", "{:.1f}")]
    prompts: Mapping[str, Mapping[str, float | None]]
    left: Annotated[Mapping[str, float], Column("{} left out", "{:.0%}")]
    quality: Annotated[float | None, Column("Q", "{:.2f}")]
    decision: Annotated[float | None, Column("decision", "{:.0f} ms", 1000)]
    deciding: Annotated[float | None, Column("deciding", "{:.2%}")]
    overran: int


def summarise(
    ways: Sequence[LatencyWay],
    answers: Sequence[LatencyAnswer],
    computed: Mapping[tuple[str, int], float],
) -> list[LatencyRow]:
    """Return the figures of each way that has answers.

    Args:
        computed: what cost tables add up to, in seconds, by way and question.
    """
    by_way: dict[str, list[LatencyAnswer]] = {}
    for answer in answers:
        by_way.setdefault(answer.way, []).append(answer)
    base = {answer.question: answer for answer in by_way.get(BASE, ())}
    return [
        _summarise_way(way, by_way[way.name], base, computed) for way in ways if way.name in by_way
    ]


def _summarise_way(
    way: LatencyWay,
    answers: Sequence[LatencyAnswer],
    base: Mapping[int, LatencyAnswer],
    computed: Mapping[tuple[str, int], float],
) -> LatencyRow:
    def over_base(value: Callable[[LatencyAnswer], float | None]) -> float | None:
        pairs = [(value(one), value(base[one.question])) for one in answers if one.question in base]
        ratios = [one / other for one, other in pairs if one is not None and other]
        return median(ratios) if ratios else None

    tables = [
        computed[key] / answer.seconds
        for answer in answers
        if (key := (answer.way, answer.question)) in computed
    ]
    decisions = [decision for answer in answers for decision in answer.decisions]
    deciding = [each.deciding / each.seconds for each in answers if each.deciding is not None]
    return LatencyRow(
        way.name,
        len(answers),
        seconds=median(answer.seconds for answer in answers),
        first_token=median(answer.first_token for answer in answers),
        relative=over_base(lambda answer: answer.seconds),
        second=fmean(answer.second for answer in answers),
        relative_second=over_base(lambda answer: answer.second),
        of_least=median(answer.least / answer.seconds for answer in answers),
        of_computed=median(tables) if tables else None,
        computed=_mean([answer.computed for answer in answers]),
        relative_computed=over_base(lambda answer: answer.computed),
        gpu_seconds=fmean(answer.gpus.seconds for answer in answers),
        prompts=_mean_prompts(answers),
        left=_left_shares(answers),
        quality=_mean([score for _, score, _, _ in decisions]),
        decision=_mean([seconds for *_, seconds in decisions]),
        deciding=_mean(deciding),
        paper=way.paper,
        overran=sum(answer.gpus.overrun > TOLERATED_SHARE for answer in answers),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _mean_prompts(answers: Sequence[LatencyAnswer]) -> dict[str, dict[str, float | None]]:
    layers = dict.fromkeys(layer for answer in answers for layer in sorted(answer.prompts))
    kinds = ("prompt", "streamed", "cached", "late")
    return {
        layer: {
            kind: _mean([one.prompts[layer][kind] for one in answers if layer in one.prompts])
            for kind in kinds
        }
        for layer in layers
    }


def _left_shares(answers: Sequence[LatencyAnswer]) -> dict[str, float]:
    asked, left = Counter[str](), Counter[str]()
    for answer in answers:
        asked.update(answer.asked)
        left.update(answer.left)
    return {agents: left[agents] / count for agents, count in sorted(asked.items()) if left[agents]}


def show(rows: Sequence[LatencyRow], report: Report) -> None:
    """Print all tables, and explain their columns."""
    report.show(
        "Latency on modelled GPUs",
        rows,
        "  seconds, first token: of a question, medians. over: all-to-all, question by "
        "question.\n  paper: Faster-MoA §5.3, at most. 2nd layer: mean of its agents, from the end "
        "of what they read.\n  least: share of the time in which the agents on the critical path "
        "decode. tables: what the cost tables\n  add up to without HTTP and scheduling, over the "
        "time. computed: tokens of prompts and answers.\n  GPU s: all GPUs' forwards. left out: "
        "share of the agents of that layer and size. Q, decision: means.\n  deciding: share of a "
        "question's time by which decisions delayed it.",
    )
    report.show(
        "Prompts by layer, tokens per question",
        [
            _LayerPrompts("" if number else row.way, layer, **counts)
            for row in rows
            for number, (layer, counts) in enumerate(row.prompts.items())
        ],
        "  streamed: computed by prompt streams before the request came; cached: by others; late: "
        "after it came.",
    )
    for row in rows:
        if row.overran:
            report.console.print(f"{row.way}: {row.overran} answers in which a GPU was too late")


@dataclass(frozen=True, slots=True)
class _LayerPrompts:
    way: Annotated[str, Column("")]
    layer: Annotated[str, Column("layer")]
    prompt: Annotated[float | None, Column("prompt", "{:.0f}")]
    streamed: Annotated[float | None, Column("streamed", "{:.0f}")]
    cached: Annotated[float | None, Column("cached", "{:.0f}")]
    late: Annotated[float | None, Column("late", "{:.0f}")]


_WAYS = [way.name for way in make_ways()]
main = command(
    "moa_latency",
    __doc__,
    _measure,
    make_roles("single", plugin=True, stock=True),
    (
        *RIG_OPTIONS,
        Option("--ways", str, _WAYS, "by default all", choices=_WAYS),
        Option(
            "--computed",
            str,
            None,
            "ask no engines: add up the cost tables of --device, for --serving or each of these",
            choices=tuple(SERVINGS),
            count="*",
        ),
        Option("--threshold", float, None, "full: leave if Q is at least this, not by chance"),
    ),
    check=_check,
    repeats=False,
)
