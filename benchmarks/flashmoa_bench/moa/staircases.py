"""Measure staircases (Staircase Streaming) and debates on modelled GPUs: first token, and the rest.

An aggregator that waits for whole answers is compared with one that writes along, by the number of
proposers, the order of chunks and the length of the first one; and a debate of two rounds with one
on a staircase. Lengths are those of recorded answers, as of moa-latency. Chunks have tokens of four
characters.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

import anyio
from rich.box import SIMPLE_HEAD
from rich.console import Console

from flashmoa.moa.prompts import Order
from flashmoa_bench.harness.command_line import positive
from flashmoa_bench.harness.modelled_gpus import TOLERATED_SHARE
from flashmoa_bench.harness.report import Report, make_table
from flashmoa_bench.harness.resuming import Key, measure_cells, measured_cells, to_results
from flashmoa_bench.moa.latency_options import make_rig_parser, make_script_options
from flashmoa_bench.moa.least_times import size_times
from flashmoa_bench.moa.rig import GpuUse, connect_rig
from flashmoa_bench.moa.script import ScriptOptions, write_script
from flashmoa_bench.moa.staircase_plans import compute_staircase
from flashmoa_bench.moa.staircase_ways import StaircaseAnswer, StaircaseWay, ask
from flashmoa_bench.recorded import load_recorded, spread

# Options that may differ between a run and the one that it resumes.
_FREE_OPTIONS = (
    "json", "resume", "questions", "proposers", "first", "orders", "kinds", "computed",
    "characters",
)  # fmt: skip
_WARM_UP = ScriptOptions(equal=12, prompt=(8, 8))
_ORDERS: tuple[Order, ...] = ("contiguous", "rounds")
_KINDS = ("mixture", "debate")


@dataclass(frozen=True, slots=True)
class StaircaseRow:
    """The figures of one way; medians over its questions, ratios question by question.

    Attributes:
        relative_first, relative_rate: first token, and tokens per second, over those of whole
            answers; ``None`` if these were not measured.
        rate: tokens of the aggregator per second of the question.
        overran: number of answers in which a GPU's forwards were computed too late.
    """

    way: str
    questions: int
    first_token: float
    relative_first: float | None
    seconds: float
    rate: float
    relative_rate: float | None
    rounds: float
    prompt: float
    late: float | None
    overran: int


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench staircases`` and return the exit status."""
    parser = make_rig_parser("staircases", __doc__)
    group = parser.add_argument_group("ways")
    group.add_argument("--kinds", nargs="+", choices=_KINDS, default=list(_KINDS))
    group.add_argument(
        "--proposers", type=positive, nargs="+", default=[3], metavar="N", help="or debaters"
    )
    group.add_argument(
        "--orders", nargs="+", choices=_ORDERS, default=["contiguous", "rounds"], help="of chunks"
    )
    group.add_argument(
        "--first", type=positive, nargs="+", default=[8], metavar="TOKENS", help="first chunk"
    )
    group.add_argument(
        "--computed",
        action="store_true",
        help="ask no engines: add up the cost tables of --device. Both orders take the same time",
    )
    group.add_argument(
        "--characters",
        type=float,
        default=4.4,
        metavar="N",
        help="with --computed: length of a token of answers (4.4, English; engines on modelled "
        "GPUs write 6.2)",
    )
    chosen = parser.parse_args(arguments)
    if chosen.computed and not chosen.device:
        parser.error("--computed needs the --device whose cost tables to take")
    if chosen.resume and not chosen.json:
        parser.error("--resume needs the --json FILE of the run to resume")
    if "debate" in chosen.kinds and min(chosen.proposers) < 2:
        parser.error("a debate needs at least two --proposers")
    if chosen.computed:
        _compute(chosen)
    else:
        anyio.run(_main, chosen)
    return 0


def _compute(arguments: argparse.Namespace) -> None:
    """Compute the ways without engines, and print and save what they take."""
    report = Report("staircases", arguments)
    report.print_head()
    ways, options, times = (
        make_ways(arguments),
        make_script_options(arguments),
        size_times(arguments),
    )
    answers = [
        compute_staircase(
            way,
            write_script(question, way.sizes, options),
            times,
            arguments.serving,
            arguments.characters,
        )
        for question in spread(load_recorded()[arguments.answers].questions, arguments.questions)
        for way in ways
    ]
    rows = summarise(ways, answers)
    show(rows, report.console)
    report.console.print(
        "  Nothing was run: forwards alone, without HTTP and scheduling, and all that can overlap "
        "does.\n",
        highlight=False,
    )
    report.save({"computed": [asdict(row) for row in rows]})


def make_ways(arguments: argparse.Namespace) -> list[StaircaseWay]:
    """Return the ways of the command line, each kind's whole answers first."""
    return [
        way
        for kind in arguments.kinds
        for count in arguments.proposers
        for way in (
            StaircaseWay(kind, count),
            *(
                StaircaseWay(kind, count, order, first)
                for order in arguments.orders
                for first in arguments.first
            ),
        )
    ]


async def _main(arguments: argparse.Namespace) -> None:
    report = Report("staircases", arguments)
    ways, options = make_ways(arguments), make_script_options(arguments)
    questions = spread(load_recorded()[arguments.answers].questions, arguments.questions)
    found = _read_answers(arguments, report)
    todo = {
        (way.name, question.number): (way, write_script(question, way.sizes, options))
        for question in questions
        for way in ways
        if (way.name, question.number) not in found
    }
    if todo:
        async with connect_rig(report, arguments, plugin=True, stock=True) as rig:
            for way, script in {way.name: (way, script) for way, script in todo.values()}.values():
                warm_up = write_script(script.question, way.sizes, _WARM_UP)
                await ask(rig, way, warm_up, arguments.seed)  # This answer does not count.
            asks = {key: partial(ask, rig, *each, arguments.seed) for key, each in todo.items()}
            await measure_cells(asks, found, report)
    wanted = {(way.name, question.number) for way in ways for question in questions}
    rows = summarise(ways, [answer for key, answer in found.items() if key in wanted])
    show(rows, report.console)
    if todo:
        report.save({**to_results(list(found.values())), "rows": [asdict(row) for row in rows]})


def _read_answers(arguments: argparse.Namespace, report: Report) -> dict[Key, StaircaseAnswer]:
    """Return the answers that are measured already; one that overran is measured again."""
    found: dict[Key, StaircaseAnswer] = {}
    if arguments.resume:
        for cell in measured_cells(arguments.json, report.settings, _FREE_OPTIONS):
            fields: dict[str, Any] = {**cell, "gpus": GpuUse(**cell["gpus"])}
            answer = StaircaseAnswer(**fields)
            if answer.gpus.overrun <= TOLERATED_SHARE:
                found[answer.way, answer.question] = answer
    return found


def summarise(
    ways: Sequence[StaircaseWay], answers: Sequence[StaircaseAnswer]
) -> list[StaircaseRow]:
    """Return the figures of each way that has answers."""
    by_way: dict[str, dict[int, StaircaseAnswer]] = {}
    for answer in answers:
        by_way.setdefault(answer.way, {})[answer.question] = answer
    return [
        _summarise_way(way, by_way[way.name], by_way.get(way.base, {}))
        for way in ways
        if way.name in by_way
    ]


def _summarise_way(
    way: StaircaseWay, answers: Mapping[int, StaircaseAnswer], base: Mapping[int, StaircaseAnswer]
) -> StaircaseRow:
    pairs = [(answers[number], base[number]) for number in answers if number in base]
    firsts = [one.first_token / other.first_token for one, other in pairs]
    rates = [_rate(one) / _rate(other) for one, other in pairs]
    late = [answer.late for answer in answers.values() if answer.late is not None]
    return StaircaseRow(
        way.name,
        len(answers),
        first_token=median(answer.first_token for answer in answers.values()),
        relative_first=median(firsts) if firsts else None,
        seconds=median(answer.seconds for answer in answers.values()),
        rate=median(map(_rate, answers.values())),
        relative_rate=median(rates) if rates else None,
        rounds=fmean(answer.rounds for answer in answers.values()),
        prompt=fmean(answer.prompt for answer in answers.values()),
        late=fmean(late) if len(late) == len(answers) else None,
        overran=sum(answer.gpus.overrun > TOLERATED_SHARE for answer in answers.values()),
    )


def _rate(answer: StaircaseAnswer) -> float:
    return answer.tokens / answer.seconds


def show(rows: Sequence[StaircaseRow], console: Console) -> None:
    """Print the table, and explain its columns."""
    table = make_table(
        "Staircases and debates on modelled GPUs",
        *("", "questions", "first token", "", "seconds", "tokens/s", "", "requests", "prompt"),
        "late",
        box=SIMPLE_HEAD,
    )
    for row in rows:
        table.add_row(
            row.way,
            f"{row.questions}",
            f"{row.first_token:.2f}",
            "" if row.relative_first is None else f"{row.relative_first - 1:+.0%}",
            f"{row.seconds:.2f}",
            f"{row.rate:.1f}",
            "" if row.relative_rate is None else f"{row.relative_rate:.2f}x",
            f"{row.rounds:.1f}",
            f"{row.prompt:.0f}",
            "?" if row.late is None else f"{row.late:.0f}",
        )
    console.print(table)
    console.print(
        "  Staircase Streaming's abstract has -93 % and 1.6x at most. tokens/s: that the "
        "aggregator wrote, over the\n  whole question. requests, prompt, late: of the aggregator; "
        "late: computed after a request came.\n",
        highlight=False,
    )
    for row in rows:
        if row.overran:
            console.print(f"{row.way}: {row.overran} answers in which a GPU was too late")
