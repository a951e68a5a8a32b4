"""Compute what ways take by the cost tables of their GPUs, without engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console

from flashmoa.moa import Topology
from flashmoa_bench.harness.report import make_table
from flashmoa_bench.moa.latency_ways import BASE, LatencyWay
from flashmoa_bench.moa.least_times import PlannedAgent, StepTimes, least_times
from flashmoa_bench.moa.rig import Serving
from flashmoa_bench.moa.script import QuestionScript

# About the tokens of an aggregator's prompt besides the question and the answers, and of a chat.
_INSTRUCTION, _CHAT = 130, 10


@dataclass(frozen=True, slots=True)
class ComputedRow:
    """What cost tables add up to for one way.

    Attributes:
        seconds: median over the questions.
        relative: median of a question's seconds over those of the same question all-to-all.
        leaves: whether every cluster is left as soon as it may be.
        by_question: seconds by the questions' numbers.
    """

    way: str
    seconds: float
    relative: float | None
    paper: float | None
    leaves: bool
    by_question: Mapping[int, float]


def plan(way: LatencyWay, script: QuestionScript, serving: Serving) -> list[PlannedAgent]:
    """Return the agents of a question, whose forwards cost tables add up.

    With early exit, every cluster is left as soon as it may be.
    """
    topology = Topology.parse(way.topology)
    needs = {"": None, "undecided": None, "ours": 2, "published": 1}[way.early_exit]
    engines = 2 if serving.startswith("dp") else 1
    agents: list[PlannedAgent] = []
    for layer, sizes in enumerate(way.sizes, 1):
        turns = Counter[str]()
        for place, size in enumerate(sizes, 1):
            reads = topology.layers[layer - 1][place - 1]
            agents.append(
                PlannedAgent(
                    f"{layer}.{place}",
                    size if turns[size] % engines == 0 else f"{size}_2",
                    script.prompt + (_INSTRUCTION if reads else _CHAT),
                    tuple(f"{layer - 1}.{read + 1}" for read in reads),
                    script.agents[f"{layer}.{place}"].tokens,
                    None if needs is None else min(needs, len(reads)),
                )
            )
            turns[size] += 1
    return agents


def compute_seconds(
    way: LatencyWay, script: QuestionScript, times: Mapping[str, StepTimes], serving: Serving
) -> float:
    """Return the seconds that cost tables add up to for a question.

    Args:
        times: times of each size's model.
    """
    engines = {f"{size}{more}": each for size, each in times.items() for more in ("", "_2")}
    agents = plan(way, script, serving)
    ends = least_times(agents, engines, overlap=way.plugin, pair=serving == "pd")
    return ends[agents[-1].name]


def compute(
    ways: Sequence[LatencyWay],
    scripts: Mapping[str, Sequence[QuestionScript]],
    times: Mapping[str, StepTimes],
    serving: Serving,
) -> list[ComputedRow]:
    """Return the figures of each way.

    Args:
        scripts: the questions' scripts, by way.
        times: times of each size's model.
    """
    seconds = {
        way.name: {
            script.question.number: compute_seconds(way, script, times, serving)
            for script in scripts[way.name]
        }
        for way in ways
    }
    base = seconds.get(BASE, {})
    rows: list[ComputedRow] = []
    for way in ways:
        own = seconds[way.name]
        ratios = [own[number] / base[number] for number in own if number in base]
        leaves = way.early_exit in ("ours", "published")
        relative = median(ratios) if ratios else None
        middle = median(own.values())
        rows.append(ComputedRow(way.name, middle, relative, way.paper, leaves, own))
    return rows


def show_computed(rows: Sequence[ComputedRow], console: Console) -> None:
    """Print the table."""
    table = make_table(
        "Seconds of a question by the GPUs' cost tables, medians",
        *("", "seconds", "over all-to-all", "paper"),
        box=SIMPLE_HEAD,
    )
    for row in rows:
        changes = (f"{ratio - 1:+.1%}" if ratio else "" for ratio in (row.relative, row.paper))
        name = f"{row.way}, always leaving" if row.leaves else row.way
        table.add_row(name, f"{row.seconds:.2f}", *changes)
    console.print(table)
    console.print(
        "  Nothing was run: forwards alone, without HTTP and scheduling. Overlap is perfect. Early "
        "exit leaves\n  every cluster as soon as it may: after two answers, as published after "
        "one. paper: Faster-MoA §5.3.\n",
        highlight=False,
    )
