"""Measure how fast a Mixture-of-Agents of three models answers, part by part (Faster-MoA §5).

Meant for modelled GPUs, whose answers mean nothing: lengths and similarities are those of recorded
answers of real models (flashmoa_bench/recorded), and confidences are drawn. As in the paper, one
question is asked at a time. --computed asks no engines: it adds up the GPUs' cost tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import anyio

from flashmoa_bench.harness.modelled_gpus import TOLERATED_SHARE
from flashmoa_bench.harness.report import Report
from flashmoa_bench.harness.rounds import measure_cells, measured_cells, to_results
from flashmoa_bench.moa.computed import compute, compute_answer, show_computed
from flashmoa_bench.moa.latency_figures import show, summarise
from flashmoa_bench.moa.latency_ways import Asker, LatencyAnswer, LatencyWay, make_ways
from flashmoa_bench.moa.least_times import size_times, tabulated_times
from flashmoa_bench.moa.rig import (
    GpuUse,
    Rig,
    connect_rig,
    make_latency_parser,
    make_script_options,
)
from flashmoa_bench.moa.script import QuestionScript, ScriptOptions, write_script
from flashmoa_bench.recorded import RecordedQuestion, load_recorded, spread

# Options that may differ between a run and the one that it resumes.
_FREE_OPTIONS = ("json", "resume", "ways", "questions", "computed")
# It has the shape of Qwen3-Embedding-4B. An embedding takes its prefill, on another GPU.
_EMBEDDING_MODEL = "Qwen/Qwen3-VL-4B-Instruct"
_WARM_UP = ScriptOptions(equal=4, prompt=(8, 8))

# Answers by way and question.
_Found = dict[tuple[str, int], LatencyAnswer]


def main(arguments: Sequence[str]) -> int:
    parser = make_latency_parser(__doc__)
    chosen = parser.parse_args(arguments)
    if chosen.resume and not chosen.json:
        parser.error("--resume needs the --json FILE of the run to resume")
    if chosen.computed is not None and not chosen.device:
        parser.error("--computed needs the --device whose cost tables to take")
    ways = {way.name: way for way in make_ways()}
    if unknown := [name for name in chosen.ways or () if name not in ways]:
        parser.error(f"there is no way {unknown[0]!r}; there are {', '.join(ways)}")
    chosen.ways = chosen.ways or list(ways)
    selected = [ways[name] for name in chosen.ways]
    if chosen.computed is not None:
        _compute(chosen, selected)
    else:
        anyio.run(_main, chosen, selected)
    return 0


def _choose_questions(arguments: argparse.Namespace) -> list[RecordedQuestion]:
    return spread(load_recorded()[arguments.answers].questions, arguments.questions)


def _compute(arguments: argparse.Namespace, ways: Sequence[LatencyWay]) -> None:
    """Compute the ways without engines, and print and save what they take."""
    report = Report("moa_latency", arguments)
    report.print_head()
    scripts = _write_scripts(ways, _choose_questions(arguments), arguments)
    times, policy = size_times(arguments), {**_policy(arguments), "seed": arguments.seed}
    rows = [
        row
        for serving in arguments.computed or [arguments.serving]
        for row in compute(ways, scripts, times, serving, policy)
    ]
    show_computed(rows, report.console)
    report.save({"computed": rows})


def _write_scripts(
    ways: Sequence[LatencyWay],
    questions: Sequence[RecordedQuestion],
    arguments: argparse.Namespace,
) -> dict[str, list[QuestionScript]]:
    options = make_script_options(arguments)
    return {
        way.name: [write_script(each, way.sizes, options) for each in questions] for way in ways
    }


async def _main(arguments: argparse.Namespace, ways: Sequence[LatencyWay]) -> None:
    report = Report("moa_latency", arguments)
    questions = _choose_questions(arguments)
    scripts = _write_scripts(ways, questions, arguments)
    found = _read_answers(arguments, report)
    todo = [
        (way, scripts[way.name][place])
        for place, turn in enumerate(_turns(ways, len(questions)))
        for way in turn
        if (way.name, questions[place].number) not in found
    ]
    if todo:
        await _measure(todo, found, arguments, report)
    times = size_times(arguments)
    chosen = [(way, script) for way in ways for script in scripts[way.name]]
    computed = {
        (way.name, script.question.number): compute_answer(
            way, script, times, arguments.serving, {}
        ).seconds
        for way, script in chosen
        if times and way.early_exit not in ("ours", "published")  # These decide by chance.
    }
    keys = [(way.name, script.question.number) for way, script in chosen]
    rows = summarise(ways, [found[key] for key in keys], computed)
    show(rows, report.console)
    if todo:
        report.save({**to_results(list(found.values())), "rows": rows})


async def _measure(
    todo: Sequence[tuple[LatencyWay, QuestionScript]],
    found: _Found,
    arguments: argparse.Namespace,
    report: Report,
) -> None:
    """Ask the questions, and write all that is found after each."""
    ways = {way.name: (way, script) for way, script in todo}
    plugin = any(way.plugin for way, _ in ways.values())
    stock = any(not way.plugin for way, _ in ways.values())
    async with connect_rig(report, arguments, plugin=plugin, stock=stock) as rig:
        asker = _make_asker(rig, arguments)
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


def _make_asker(rig: Rig, arguments: argparse.Namespace) -> Asker:
    embedding = _embedding_seconds(arguments)
    return Asker(rig, _policy(arguments), embedding, arguments.seed)


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


def _read_answers(arguments: argparse.Namespace, report: Report) -> _Found:
    """Return the answers that are measured already; one that overran is measured again."""
    if not arguments.resume:
        return {}
    found: _Found = {}
    for cell in measured_cells(arguments.json, report.settings, _FREE_OPTIONS):
        fields: dict[str, Any] = {**cell, "gpus": GpuUse(**cell["gpus"])}
        answer = LatencyAnswer(**fields)
        if answer.gpus.overrun <= TOLERATED_SHARE:
            found[answer.way, answer.question] = answer
    return found
