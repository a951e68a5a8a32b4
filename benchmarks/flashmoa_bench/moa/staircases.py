"""Measure staircases (Staircase Streaming) and debates on modelled GPUs: first token, and the rest.

An aggregator that waits for whole answers is compared with one that writes along, by the number of
proposers, the order of chunks and the length of the first one; and a debate of two rounds with one
on a staircase. Lengths are those of recorded answers, as of moa-latency. Chunks have tokens of four
characters.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

import anyio
from rich.box import SIMPLE_HEAD
from rich.console import Console

from flashmoa.linking.link import Ahead
from flashmoa.moa import AggregationPrompt, Debate, MixtureOfAgents, Staircase, Steps
from flashmoa.moa.prompts import Order
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import positive
from flashmoa_bench.harness.modelled_gpus import TOLERATED_SHARE
from flashmoa_bench.harness.report import Report, make_table
from flashmoa_bench.harness.rounds import Key, measure_cells, measured_cells, to_results
from flashmoa_bench.moa.rig import (
    GpuUse,
    PromptListener,
    Rig,
    compare_devices,
    connect_rig,
    make_rig_parser,
    make_script_options,
)
from flashmoa_bench.moa.script import QuestionScript, ScriptOptions, write_script
from flashmoa_bench.recorded import SIZES, load_recorded, spread

# Of a debate.
ROUNDS = 2


@dataclass(frozen=True, slots=True)
class StaircaseWay:
    """A way to answer.

    Attributes:
        kind: ``mixture``: proposers and an aggregator; ``debate``: two rounds and an aggregator.
        proposers: number of proposers, or of debaters.
        order: order of the chunks; ``None``: whole answers are waited for, on stock SGLang.
        first: length of the first chunk, in tokens of four characters.
    """

    kind: str
    proposers: int
    order: Order | None = None
    first: int = 0

    @property
    def name(self) -> str:
        form = "whole answers" if self.order is None else f"{self.order}, {self.first}"
        return f"{self.kind} of {self.proposers}: {form}"

    @property
    def base(self) -> str:
        """Return the name of the way that this one is compared with."""
        return StaircaseWay(self.kind, self.proposers).name

    @property
    def steps(self) -> Steps | None:
        """Return the settings of the staircase; ``None``: whole answers are waited for."""
        return None if self.order is None else Steps(self.first, order=self.order)

    @property
    def sizes(self) -> list[list[str]]:
        """Return the sizes of the agents' models, by layer: small, medium and large in turn."""
        return [[SIZES[place % 3] for place in range(self.proposers)], [SIZES[-1]]]


@dataclass(frozen=True, slots=True)
class StaircaseAnswer:
    """What one question took in one way; times in seconds of the modelled GPUs.

    Attributes:
        tokens: number of tokens that the aggregator wrote.
        rounds: number of requests in which it wrote them.
        prompt, late: prompt tokens of all its requests, and those that were computed after the
            requests came.
    """

    way: str
    question: int
    first_token: float
    seconds: float
    tokens: int
    rounds: int
    prompt: float
    late: float | None
    gpus: GpuUse


async def ask(rig: Rig, way: StaircaseWay, script: QuestionScript, seed: int) -> StaircaseAnswer:
    """Answer a question in one way, on empty caches.

    Raises: MixtureFailed if there is no answer.
    """
    await rig.flush()
    before = await rig.read_devices()
    prompts = PromptListener(rig.reporting)
    system = _make_system(rig, way, script, prompts)
    first_token: float | None = None
    began = time.time()
    async with system.answering(rig.question(script, seed)) as run:
        async for _ in run:
            first_token = first_token or time.time()
        result = await run.result()
    ended = time.time()
    last = max(prompts.by_agent)
    total = prompts.by_agent[last]
    writer = next(agent for agent in result.agents if agent.name == last)
    return StaircaseAnswer(
        way.name,
        script.question.number,
        clock.seconds_of((first_token or ended) - began),
        clock.seconds_of(ended - began),
        writer.usage.completion_tokens if writer.usage is not None else 0,
        max(1, len(writer.steps)),
        total.prompt,
        total.late,
        compare_devices(before, await rig.read_devices()),
    )


def _make_system(
    rig: Rig, way: StaircaseWay, script: QuestionScript, listener: PromptListener
) -> MixtureOfAgents | Staircase | Debate:
    plugin = way.order is not None
    proposers, [aggregator] = rig.models(script, way.sizes, plugin=plugin)
    ahead: Ahead = "text" if plugin else "nothing"
    prompt = AggregationPrompt("question-first")
    if way.kind == "debate":
        return Debate(
            proposers, ROUNDS, aggregator, staircase=way.steps, ahead=ahead, listener=listener
        )
    if way.steps is None:
        return MixtureOfAgents(
            [proposers, [aggregator]], prompt=prompt, ahead=ahead, listener=listener
        )
    return Staircase(
        proposers,
        aggregator,
        prompt=prompt,
        steps=way.steps,
        ahead=ahead,
        listener=listener,
    )


# Options that may differ between a run and the one that it resumes.
_FREE_OPTIONS = (
    "json", "resume", "questions", "proposers", "first", "orders", "kinds",
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
    chosen = parser.parse_args(arguments)
    if chosen.resume and not chosen.json:
        parser.error("--resume needs the --json FILE of the run to resume")
    if "debate" in chosen.kinds and min(chosen.proposers) < 2:
        parser.error("a debate needs at least two --proposers")
    anyio.run(_main, chosen)
    return 0


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
        report.save({**to_results(list(found.values())), "rows": rows})


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
