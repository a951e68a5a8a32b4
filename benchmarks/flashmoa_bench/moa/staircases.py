"""Measure staircases (Staircase Streaming) and debates on modelled GPUs: first token, and the rest.

An aggregator that waits for whole answers is compared with one that writes along, by the number of
proposers, the order of chunks and the length of the first chunk. A debate of two rounds is compared
with a debate on a staircase. Lengths are recorded answers', as in moa-latency.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Annotated

from flashmoa.link.link import Ahead
from flashmoa.moa import AgentAnswer, Debate, MixtureOfAgents, Staircase, Steps
from flashmoa.moa.settings import Order
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import Option, command, positive
from flashmoa_bench.harness.modelled_gpus import (
    TOLERATED_SHARE,
    model_of,
    read_devices,
    worst_overrun,
)
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.harness.rounds import measure_cells, measured_cells
from flashmoa_bench.moa.rig import (
    RIG_OPTIONS,
    QuestionScript,
    Rig,
    ScriptOptions,
    Seconds,
    connect_rig,
    make_roles,
    prefill_seconds,
    write_script,
)
from flashmoa_bench.recorded import SIZES, load_recorded, spread


@dataclass(frozen=True, slots=True)
class StaircaseWay:
    """A way to answer.

    Attributes:
        kind: ``mixture``: proposers and an aggregator; ``debate``: two rounds and an aggregator.
        proposers: number of proposers, or of debaters.
        order: order of the chunks; ``None`` waits for whole answers, on stock SGLang.
        first: number of tokens of the first chunk.
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
        """Return the name of the way to compare with."""
        return StaircaseWay(self.kind, self.proposers).name

    @property
    def steps(self) -> Steps | None:
        """Return the settings of the staircase; ``None`` waits for whole answers."""
        return None if self.order is None else Steps(self.first, order=self.order)

    @property
    def sizes(self) -> list[list[str]]:
        """Return the sizes of the agents' models, by layer: small, medium and large in turn."""
        return [[SIZES[place % 3] for place in range(self.proposers)], [SIZES[-1]]]


@dataclass(frozen=True, slots=True)
class StaircaseAnswer:
    """One question's figures in one way; times in seconds of the modelled GPUs.

    Attributes:
        tokens: number of tokens that the aggregator wrote.
        rounds: number of the aggregator's requests.
        overrun: delay of forwards over a GPU's time, the largest of all engines.
        formula: time to the first token by the paper's formula; ``None`` for a debate, which has
            none, and without ``--device``.
    """

    way: str
    question: int
    first_token: float
    seconds: float
    tokens: int
    rounds: int
    overrun: float
    formula: float | None = None


async def ask(
    rig: Rig, way: StaircaseWay, script: QuestionScript, prefill: Seconds | None, seed: int
) -> StaircaseAnswer:
    """Answer a question in one way, on empty caches.

    Args: prefill: the aggregator's time for a prefill, by its tokens; ``None`` if unknown.

    Raises: MixtureFailed if there is no answer.
    """
    await rig.flush()
    before = await read_devices(rig.own)
    result = await _make_system(rig, way, script).answer(rig.question(script, seed))
    usage = result.final.usage
    [first, *_] = [*(step.usage for step in result.final.steps), usage]
    formula = None
    if way.kind == "mixture" and prefill is not None and first is not None:
        began = min(agent.started or 0.0 for agent in result.layers[0])
        proposers = [Written.of(agent, began) for agent in result.layers[0]]
        formula = first_token_by_formula(proposers, way.first, prefill(first.prompt_tokens))
    return StaircaseAnswer(
        way.name,
        script.question.number,
        clock.seconds_of(result.time_to_first_token),
        clock.seconds_of(result.seconds),
        usage.completion_tokens if usage is not None else 0,
        max(1, len(result.final.steps)),
        worst_overrun(before, await read_devices(rig.own)),
        formula,
    )


@dataclass(frozen=True, slots=True)
class Written:
    """A proposer's answer: seconds until its first and last token, and number of tokens."""

    first: float
    last: float
    tokens: int

    @classmethod
    def of(cls, agent: AgentAnswer, began: float) -> Written:
        """Return the figures of an agent's answer, counted from ``began`` in Unix seconds."""
        moments = (agent.first_token or began, agent.finished or began)
        first, last = (clock.seconds_of(moment - began) for moment in moments)
        return cls(first, last, agent.tokens)


def first_token_by_formula(proposers: Sequence[Written], chunk: int, prefill: float) -> float:
    """Return the time to the first token by Staircase Streaming's formulas, without overlap.

    The slowest proposer's chunk, then the aggregator's whole prefill. Within an answer each token
    takes the same time.

    Args:
        chunk: number of tokens of the first chunk; 0 for whole answers.
        prefill: the aggregator's seconds for its first prompt.
    """
    chunks: list[float] = []
    for one in proposers:
        share = (chunk - 1) / (one.tokens - 1) if 0 < chunk < one.tokens else 1.0
        chunks.append(one.first + (one.last - one.first) * share)
    return max(chunks) + prefill


def _make_system(
    rig: Rig, way: StaircaseWay, script: QuestionScript
) -> MixtureOfAgents | Staircase | Debate:
    plugin = way.order is not None
    proposers, [aggregator] = rig.models(script, way.sizes, plugin=plugin)
    ahead: Ahead = "text" if plugin else "nothing"
    if way.kind == "debate":
        rounds = 2
        return Debate(proposers, rounds, aggregator, staircase=way.steps, ahead=ahead)
    if way.steps is None:
        return MixtureOfAgents([proposers, [aggregator]], ahead=ahead)
    return Staircase(proposers, aggregator, steps=way.steps, ahead=ahead)


# Options that may differ between a run and the run that it resumes.
_FREE_OPTIONS = ("questions", "proposers", "first", "orders", "kinds")
_WARM_UP = ScriptOptions(equal=12, scale=0.1)
_ORDERS: tuple[Order, ...] = ("contiguous", "prefix-cached")
_KINDS = ("mixture", "debate")


@dataclass(frozen=True, slots=True)
class StaircaseRow:
    """One way's figures; medians over its questions, ratios question by question.

    Attributes:
        formula: time to the first token by the paper's formula, see :func:`first_token_by_formula`.
        relative_first, relative_rate: first token, and tokens per second, over whole answers';
            ``None`` if whole answers were not measured.
        rate: tokens of the aggregator per second of the question.
        overran: number of answers with too late forwards.
    """

    way: Annotated[str, Column("")]
    questions: Annotated[int, Column("questions")]
    first_token: Annotated[float, Column("first token", "{:.2f}")]
    relative_first: Annotated[float | None, Column("over", "{:+.0%}", less=1)]
    formula: Annotated[float | None, Column("by formula", "{:.2f}")]
    seconds: Annotated[float, Column("seconds", "{:.2f}")]
    rate: Annotated[float, Column("tokens/s", "{:.1f}")]
    relative_rate: Annotated[float | None, Column("over", "{:.2f}x")]
    rounds: Annotated[float, Column("requests", "{:.1f}")]
    overran: int


def aggregator_prefill_seconds(arguments: argparse.Namespace) -> Seconds | None:
    """Return the aggregator's time for a prefill by its tokens; ``None`` without ``--device``.

    Raises: EngineError if there are no times for this GPU.
    """
    if not arguments.device:
        return None
    model = model_of(SIZES[-1], arguments.device_model)
    return prefill_seconds(arguments.device, model, arguments.device_tp, arguments.device_weights)


def make_ways(arguments: argparse.Namespace) -> list[StaircaseWay]:
    """Return the ways of the command line; each kind's whole answers come first."""
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


def _check(options: argparse.Namespace) -> str | None:
    if "debate" in options.kinds and min(options.proposers) < 2:
        return "a debate needs at least two --proposers"
    return None


async def _measure(report: Report) -> None:
    options = report.options
    ways, script_options = make_ways(options), ScriptOptions.parse(options)
    questions = spread(load_recorded()[options.answers].questions, options.questions)
    cells = measured_cells(report, StaircaseAnswer, _FREE_OPTIONS)
    found = {(cell.way, cell.question): cell for cell in cells}
    todo = {
        (way.name, question.number): (way, write_script(question, way.sizes, script_options))
        for question in questions
        for way in ways
        if (way.name, question.number) not in found
    }
    if todo:
        async with connect_rig(report, plugin=True, stock=True) as rig:
            prefill = aggregator_prefill_seconds(options)
            for way, script in {way.name: (way, script) for way, script in todo.values()}.values():
                warm_up = write_script(script.question, way.sizes, _WARM_UP)
                await ask(rig, way, warm_up, prefill, options.seed)  # This answer does not count.
            asks = {
                key: partial(ask, rig, *each, prefill, options.seed) for key, each in todo.items()
            }
            await measure_cells(asks, found, report)
    wanted = {(way.name, question.number) for way in ways for question in questions}
    rows = summarise(ways, [answer for key, answer in found.items() if key in wanted])
    report.show(
        "Staircases and debates on modelled GPUs",
        rows,
        "  Staircase Streaming's abstract has -93 % and 1.6x at most. over: whole answers. "
        "by formula: the\n  slowest proposer's first chunk (or answer), and the aggregator's whole "
        "prefill. tokens/s: the\n  aggregator's tokens over the question. requests: its own.",
    )
    for row in rows:
        if row.overran:
            report.console.print(f"{row.way}: {row.overran} answers in which a GPU was too late")
    if todo:
        report.save({"cells": list(found.values()), "rows": rows})


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
    formulas = [each.formula for each in answers.values() if each.formula is not None]
    return StaircaseRow(
        way.name,
        len(answers),
        first_token=median(answer.first_token for answer in answers.values()),
        relative_first=median(firsts) if firsts else None,
        formula=median(formulas) if formulas else None,
        seconds=median(answer.seconds for answer in answers.values()),
        rate=median(map(_rate, answers.values())),
        relative_rate=median(rates) if rates else None,
        rounds=fmean(answer.rounds for answer in answers.values()),
        overran=sum(answer.overrun > TOLERATED_SHARE for answer in answers.values()),
    )


def _rate(answer: StaircaseAnswer) -> float:
    return answer.tokens / answer.seconds


main = command(
    "staircases",
    __doc__,
    _measure,
    make_roles("single", plugin=True, stock=True),
    *RIG_OPTIONS,
    Option("--kinds", str, list(_KINDS), "of systems", choices=_KINDS),
    Option("--proposers", positive, [3], "or debaters"),
    Option("--orders", str, list(_ORDERS), "of chunks", choices=_ORDERS),
    Option("--first", positive, [8], "tokens of the first chunk"),
    check=_check,
    repeats=False,
)
