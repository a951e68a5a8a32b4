"""Compute what ways take by the cost tables of their GPUs, without engines."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, median
from typing import Any, cast

from rich.box import SIMPLE_HEAD
from rich.console import Console

from flashmoa.moa import EarlyExit, Embedder, Topology
from flashmoa.moa.early_exit import compute_quality
from flashmoa_bench.harness.report import make_table
from flashmoa_bench.moa.latency_ways import BASE, LatencyWay
from flashmoa_bench.moa.least_times import PlannedAgent, Span, StepTimes, least_times
from flashmoa_bench.moa.rig import Serving
from flashmoa_bench.moa.script import QuestionScript

# About the tokens of an aggregator's prompt besides the question and the answers, and of a chat.
INSTRUCTION, CHAT = 130, 10
# Similarities are recorded.
_NO_EMBEDDER = cast("Embedder", None)


@dataclass(frozen=True, slots=True)
class ComputedRow:
    """What cost tables add up to for one way.

    Attributes:
        seconds: median over the questions.
        second: mean seconds of the second layer's agents, from the end of what they read.
        relative: median of a question's seconds over those of the same question all-to-all.
        left: share of agents that were left out, by layer and size.
        by_question: seconds by the questions' numbers.
    """

    way: str
    serving: Serving
    seconds: float
    second: float
    relative: float | None
    paper: float | None
    left: Mapping[str, float]
    by_question: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class ComputedAnswer:
    """What cost tables add up to for one question; the agents' requests, and when they end."""

    agents: Sequence[PlannedAgent]
    spans: Mapping[str, Span]

    @property
    def seconds(self) -> float:
        """Return the seconds from the question to the end of its answer."""
        return self.spans[self.agents[-1].name].end

    @property
    def second(self) -> list[float]:
        """Return the seconds of the second layer's agents, from the end of what they read."""
        spans = self.spans
        return [
            spans[agent.name].end - max(spans[name].end for name in agent.reads if name in spans)
            for agent in self.agents
            if agent.name.startswith("2.") and agent.name in spans
        ]


def plan(
    way: LatencyWay, script: QuestionScript, serving: Serving, policy: EarlyExit | None = None
) -> list[PlannedAgent]:
    """Return the agents of a question, whose forwards cost tables add up."""
    topology = Topology.parse(way.topology)
    suffice = None if policy is None else _judge(policy, script)
    agents: list[PlannedAgent] = []
    for layer, sizes in enumerate(way.sizes, 1):
        for place, engine in enumerate(name_engines(sizes, serving), 1):
            reads = topology.layers[layer - 1][place - 1]
            applies = policy is not None and policy.applies_to(len(reads))
            agents.append(
                PlannedAgent(
                    f"{layer}.{place}",
                    engine,
                    script.prompt + (INSTRUCTION if reads else CHAT),
                    tuple(f"{layer - 1}.{read + 1}" for read in reads),
                    script.agents[f"{layer}.{place}"].tokens,
                    suffice if applies else None,
                )
            )
    return agents


def name_engines(sizes: Sequence[str], serving: Serving) -> list[str]:
    """Return the names of the engines of a layer's agents, which take those of a size in turns."""
    turns = Counter[str]()
    names: list[str] = []
    for size in sizes:
        second = serving.startswith("dp") and turns[size] % 2
        names.append(f"{size}_2" if second else size)
        turns[size] += 1
    return names


def _judge(policy: EarlyExit, script: QuestionScript) -> Callable[[tuple[str, ...]], bool]:
    """Return what decides whether complete answers suffice, once for the same answers."""
    dice = random.Random(policy.seed)

    @cache
    def suffice(complete: tuple[str, ...]) -> bool:
        confidences = [script.agents[name].confidence for name in complete]
        similarities = [
            [script.similarity(other, name) for other in complete[:place]]
            for place, name in enumerate(complete)
        ]
        quality = compute_quality(
            confidences, similarities, tau=policy.tau, diagonal=policy.diagonal
        )
        return policy.suffices(quality, len(complete), dice)

    return suffice


def compute_answer(
    way: LatencyWay,
    script: QuestionScript,
    times: Mapping[str, StepTimes],
    serving: Serving,
    early_exit: Mapping[str, Any],
) -> ComputedAnswer:
    """Return what cost tables add up to for a question. Decisions take no time.

    Args:
        times: times of each size's model.
        early_exit: arguments of :class:`EarlyExit`.
    """
    engines = {f"{size}{more}": each for size, each in times.items() for more in ("", "_2")}
    policy = way.policy(EarlyExit(_NO_EMBEDDER, **early_exit))
    agents = plan(way, script, serving, policy)
    pair, mixed = serving == "pd", serving == "dp-mixed"
    spans = least_times(agents, engines, overlap=way.plugin, pair=pair, mixed=mixed)
    return ComputedAnswer(agents, spans)


def compute(
    ways: Sequence[LatencyWay],
    scripts: Mapping[str, Sequence[QuestionScript]],
    times: Mapping[str, StepTimes],
    serving: Serving,
    early_exit: Mapping[str, Any],
) -> list[ComputedRow]:
    """Return the figures of each way; the arguments are those of :func:`compute_answer`.

    Args:
        scripts: the questions' scripts, by way.
    """
    found = {
        way.name: {
            script.question.number: compute_answer(way, script, times, serving, early_exit)
            for script in scripts[way.name]
        }
        for way in ways
    }
    base = found.get(BASE, {})
    rows: list[ComputedRow] = []
    for way in ways:
        own = found[way.name]
        ratios = [own[number].seconds / base[number].seconds for number in own if number in base]
        rows.append(
            ComputedRow(
                way.name,
                serving,
                median(answer.seconds for answer in own.values()),
                fmean(seconds for answer in own.values() for seconds in answer.second),
                median(ratios) if ratios else None,
                way.paper,
                _left_shares(way, own.values()),
                {number: answer.seconds for number, answer in own.items()},
            )
        )
    return rows


def _left_shares(way: LatencyWay, answers: Collection[ComputedAnswer]) -> dict[str, float]:
    left = Counter[str]()
    for answer in answers:
        for agent in answer.agents:
            if agent.name not in answer.spans:
                layer, place = map(int, agent.name.split("."))
                left[f"{layer} {way.sizes[layer - 1][place - 1]}"] += 1
    asked = Counter(f"{layer} {size}" for layer, sizes in enumerate(way.sizes, 1) for size in sizes)
    return {name: left[name] / asked[name] / len(answers) for name in asked if left[name]}


def show_computed(rows: Sequence[ComputedRow], console: Console) -> None:
    """Print the table."""
    table = make_table(
        "Seconds of a question by the GPUs' cost tables, medians",
        *("", "GPUs", "seconds", "over all-to-all", "paper", "2nd layer", "left out"),
        box=SIMPLE_HEAD,
    )
    for row in rows:
        changes = (f"{ratio - 1:+.1%}" if ratio else "" for ratio in (row.relative, row.paper))
        left = ", ".join(f"{name} {share:.0%}" for name, share in row.left.items())
        cells = (f"{row.seconds:.2f}", *changes, f"{row.second:.3f}")
        table.add_row(row.way, row.serving, *cells, left)
    console.print(table)
    console.print(
        "  Nothing was run: forwards alone, without HTTP and scheduling. Overlap is perfect, and "
        "early exit decides in\n  no time. 2nd layer: mean of its agents, from the end of what "
        "they read. left out: share of the agents of a\n  layer and size. paper: Faster-MoA §5.3."
        "\n",
        highlight=False,
    )
