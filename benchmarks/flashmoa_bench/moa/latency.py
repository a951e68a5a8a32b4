"""Measure the time of a Mixture-of-Agents of three models, part by part (Faster-MoA §5).

Made for modelled GPUs, whose answers mean nothing. Lengths and similarities are recorded answers'
of real models (flashmoa_bench/recorded), and confidences are drawn. As in the paper, one question
is asked at a time.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Annotated, Any, Literal

from flashmoa.moa import EarlyExit, MixtureOfAgents, Result, Topology
from flashmoa.observe import Event
from flashmoa.observe.calls import calls
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import Option, command
from flashmoa_bench.harness.critical_path import decoding_seconds
from flashmoa_bench.harness.modelled_gpus import (
    TOLERATED_SHARE,
    model_of,
    read_devices,
    worst_overrun,
)
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.harness.rounds import Key, measure_cells, measured_cells
from flashmoa_bench.moa.computed import ComputedMixture, Gpus
from flashmoa_bench.moa.rig import (
    RIG_OPTIONS,
    QuestionScript,
    ReplayedEmbedder,
    Rig,
    ScriptOptions,
    Seconds,
    connect_rig,
    forward_seconds,
    make_roles,
    prefill_seconds,
    write_script,
)
from flashmoa_bench.recorded import SIZES, load_recorded, spread

# The way to compare with. The paper's figures (Faster-MoA, arXiv 2512.18126, §5.3), on six H200,
# are also over it: reductions of at most 62, 76 and 90 %.
BASE = "all-to-all"
Exit = Literal["", "undecided", "ours", "published"]


@dataclass(frozen=True, slots=True)
class LatencyWay:
    """A way to answer.

    Attributes:
        plugin: whether it runs on engines with the plugin, and prompts overlap.
        early_exit: its rule; ``undecided`` decides and never leaves.
        paper: Faster-MoA's latency over all-to-all's; ``None`` if the paper has none.
    """

    name: str
    topology: str
    sizes: Sequence[Sequence[str]]
    plugin: bool
    early_exit: Exit = ""
    paper: float | None = None

    def policy(self, policy: EarlyExit) -> EarlyExit | None:
        """Return this way's policy, given the command line's; ``None`` without early exit."""
        if self.early_exit == "published":
            return EarlyExit.as_published(policy.embedder, policy.seed)
        if self.early_exit == "undecided":  # Q stays below 1, so this never leaves.
            return replace(policy, rule="threshold", threshold=1.0)
        return policy if self.early_exit else None


def make_ways(second: str = "mixed") -> list[LatencyWay]:
    """Return the ways; ``second`` is the second layer's size of models, or ``mixed`` for all."""
    root = SIZES[-1]
    dense = (_in_turn("mixed", 9), _in_turn(second, 9), [root])
    tree = (_in_turn("mixed", 9), _in_turn(second, 3), [root])
    return [
        LatencyWay(BASE, "9x9x1", dense, plugin=False),
        LatencyWay("tree", "9-3-1", tree, plugin=False, paper=0.38),
        LatencyWay("tree + overlap", "9-3-1", tree, plugin=True, paper=0.24),
        LatencyWay("undecided", "9-3-1", tree, plugin=True, early_exit="undecided"),
        LatencyWay("full", "9-3-1", tree, plugin=True, early_exit="ours"),
        LatencyWay("as published", "9-3-1", tree, plugin=True, early_exit="published", paper=0.1),
    ]


def _in_turn(sizes: str, count: int) -> list[str]:
    return [SIZES[place % 3] if sizes == "mixed" else sizes for place in range(count)]


@dataclass(frozen=True, slots=True)
class LatencyAnswer:
    """One question's figures in one way; times in seconds of the modelled GPUs.

    Attributes:
        least: decode time of the critical path; no linking can be faster.
        second: mean time of the second layer's agents, from the end of their inputs to their end.
        written: tokens of all answers, estimated for cancelled agents.
        asked, left: number of agents that were asked, and left out, by layer and size.
        decisions: complete answers, Q, whether the other agents were left out, and seconds.
        deciding: delay of the answer by decisions; ``None`` without early exit.
        overrun: delay of forwards over a GPU's time, the largest of all engines.
    """

    way: str
    question: int
    seconds: float
    first_token: float
    least: float
    second: float
    written: int
    asked: Mapping[str, int]
    left: Mapping[str, int]
    decisions: Sequence[tuple[int, float, bool, float]]
    deciding: float | None
    overrun: float = 0.0


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks questions on a rig.

    Attributes:
        early_exit: the command line's policy, without embedder and seed.
        embedding: seconds of the embedding model for texts, by the number of their tokens.
    """

    rig: Rig
    early_exit: Mapping[str, Any]
    embedding: Seconds
    seed: int

    async def ask(self, way: LatencyWay, script: QuestionScript) -> LatencyAnswer:
        """Answer a question in one way, on empty caches.

        Raises: MixtureFailed if there is no answer.
        """
        await self.rig.flush()
        before = await read_devices(self.rig.own)
        events: list[Event] = []
        embedder = ReplayedEmbedder(script, self.embedding)

        def listen(event: Event) -> None:
            events.append(event)
            embedder(event)

        seed = self.seed + script.question.number
        mixture = MixtureOfAgents(
            self.rig.models(script, way.sizes, plugin=way.plugin),
            way.topology,
            early_exit=way.policy(EarlyExit(embedder, seed=seed, **self.early_exit)),
            ahead="text" if way.plugin else "nothing",
            listener=listen,
        )
        began = time.time()
        result = await mixture.answer(self.rig.question(script, self.seed))
        ended = time.time()
        return LatencyAnswer(
            **_describe(way, script, result, began, ended),
            least=clock.seconds_of(decoding_seconds(calls(events), began)),
            overrun=worst_overrun(before, await read_devices(self.rig.own)),
        )


def _describe(
    way: LatencyWay, script: QuestionScript, result: Result, began: float, ended: float
) -> dict[str, Any]:
    """Return the fields of an answer that come from its result."""
    sizes = {
        (agent.layer, agent.place): f"{agent.layer + 1} {way.sizes[agent.layer][agent.place]}"
        for agent in result.agents
    }
    left = [agent for agent in result.agents if agent.status == "left out"]
    return {
        "way": way.name,
        "question": script.question.number,
        "seconds": clock.seconds_of(ended - began),
        "first_token": clock.seconds_of((result.final.first_token or ended) - began),
        "second": clock.seconds_of(_second_layer_seconds(way, result)),
        "written": result.spending.completion_tokens,
        "asked": dict(Counter(sizes.values())),
        "left": dict(Counter(sizes[agent.layer, agent.place] for agent in left)),
        "decisions": [
            (each.answers, each.quality.score, each.left, clock.seconds_of(each.seconds))
            for each in result.decisions
        ],
        "deciding": clock.seconds_of(result.deciding) if way.early_exit else None,
    }


def _second_layer_seconds(way: LatencyWay, result: Result) -> float:
    """Return the mean time of the second layer's agents, after the end of their inputs."""
    reads = Topology.parse(way.topology).layers[1]
    spans: list[float] = []
    for agent in result.layers[1]:
        read = [result.layers[0][place] for place in reads[agent.place]]
        ready = [one.finished for one in read if one.status == "used" and one.finished is not None]
        if agent.finished is not None and agent.status == "used" and ready:
            spans.append(agent.finished - max(ready))
    return fmean(spans) if spans else 0.0


# Options that may differ between a run and the run that it resumes.
_FREE_OPTIONS = ("ways", "questions")
# This model has the shape of Qwen3-Embedding-4B. An embedding takes a prefill on another GPU.
_EMBEDDING_MODEL = "Qwen/Qwen3-VL-4B-Instruct"
_WARM_UP = ScriptOptions(equal=4, scale=0.1)


async def _measure(report: Report) -> None:
    options = report.options
    ways = [way for way in make_ways() if way.name in options.ways]
    questions = spread(load_recorded()[options.answers].questions, options.questions)
    script_options = ScriptOptions.parse(options)
    scripts = {
        way.name: [write_script(each, way.sizes, script_options) for each in questions]
        for way in ways
    }
    if options.computed:
        gpus = _gpu_seconds(options)
        answers = [
            _compute(way, script, gpus, options) for way in ways for script in scripts[way.name]
        ]
        rows = summarise(ways, answers)
        show(rows, report)
        report.save({"cells": answers, "rows": rows})
        return
    cells = measured_cells(report, LatencyAnswer, _FREE_OPTIONS)
    found = {(cell.way, cell.question): cell for cell in cells}
    todo = [
        (way, scripts[way.name][place])
        for place in range(len(questions))
        for way in [*ways[place % len(ways) :], *ways[: place % len(ways)]]
        if (way.name, questions[place].number) not in found
    ]
    if todo:
        await _ask_all(todo, found, report)
    keys = [(way.name, script.question.number) for way in ways for script in scripts[way.name]]
    rows = summarise(ways, [found[key] for key in keys])
    show(rows, report)
    if todo:
        report.save({"cells": list(found.values()), "rows": rows})


async def _ask_all(
    todo: Sequence[tuple[LatencyWay, QuestionScript]],
    found: dict[Key, LatencyAnswer],
    report: Report,
) -> None:
    """Ask the questions, and write all found answers after each."""
    ways = {way.name: (way, script) for way, script in todo}
    plugin = any(way.plugin for way, _ in ways.values())
    stock = any(not way.plugin for way, _ in ways.values())
    options = report.options
    async with connect_rig(report, plugin=plugin, stock=stock) as rig:
        asker = Asker(rig, _early_exit(options), _embedding_seconds(options), options.seed)
        for way, script in ways.values():  # These answers do not count.
            await asker.ask(way, write_script(script.question, way.sizes, _WARM_UP))
        asks = {
            (way.name, script.question.number): partial(asker.ask, way, script)
            for way, script in todo
        }
        await measure_cells(asks, found, report)


def _early_exit(options: argparse.Namespace) -> dict[str, Any]:
    """Return the policy of a command line, without embedder and seed."""
    if options.threshold is None:
        return {}
    return {"rule": "threshold", "threshold": options.threshold}


def _compute(
    way: LatencyWay, script: QuestionScript, gpus: Gpus, options: argparse.Namespace
) -> LatencyAnswer:
    """Compute a question's figures from tables of forward times."""
    embedding = _embedding_seconds(options)
    seed = options.seed + script.question.number
    embedder = ReplayedEmbedder(script, embedding)
    early_exit = way.policy(EarlyExit(embedder, seed=seed, **_early_exit(options)))
    mixture = ComputedMixture(
        script, way.topology, way.sizes, gpus,
        overlaps=way.plugin, early_exit=early_exit, embedding=embedding,
    )  # fmt: skip
    mixture.run()
    asked = dict(
        Counter(f"{layer} {size}" for layer, row in enumerate(way.sizes, 1) for size in row)
    )
    read = [answer for answer in mixture.layers[1] if not answer.is_left_out]
    return LatencyAnswer(
        way.name,
        script.question.number,
        mixture.final.end,
        mixture.final.first,
        least=mixture.decoding_seconds(),
        second=fmean(answer.end - mixture.begun(answer) for answer in read),
        written=sum(answer.written for row in mixture.layers for answer in row),
        asked=asked,
        left=dict(mixture.left_out()),
        decisions=[],
        deciding=None,
    )


def _gpu_seconds(options: argparse.Namespace) -> Gpus:
    """Return each size's time for a forward, by tables.

    Raises: EngineError if there are none.
    """
    return {
        size: forward_seconds(
            options.device,
            model_of(size, options.device_model),
            options.device_tp,
            options.device_weights,
        )
        for size in SIZES
    }


def _embedding_seconds(arguments: argparse.Namespace) -> Seconds:
    """Return a function from texts' tokens to their embedding's seconds; 0 without ``--device``.

    Raises: EngineError if there are no times for this GPU.
    """
    if not arguments.device:
        return lambda _tokens: 0.0
    return prefill_seconds(arguments.device, _EMBEDDING_MODEL)


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """One way's figures; medians and means are over its questions.

    Attributes:
        seconds, first_token: medians, in seconds.
        relative: median of a question's seconds over the same question's all-to-all.
        second, relative_second: mean seconds of the second layer's agents, and over all-to-all's.
        of_least: the critical path's decode time over the question's time, median.
        left: share of agents that were left out, by layer and size.
        deciding: delay by decisions over the question's time, mean.
        overran: number of answers with too late forwards.
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
    left: Annotated[Mapping[str, float], Column("{} left out", "{:.0%}")]
    deciding: Annotated[float | None, Column("deciding", "{:.2%}")]
    overran: int


def summarise(ways: Sequence[LatencyWay], answers: Sequence[LatencyAnswer]) -> list[LatencyRow]:
    """Return the figures of each way that has answers."""
    by_way: dict[str, list[LatencyAnswer]] = {}
    for answer in answers:
        by_way.setdefault(answer.way, []).append(answer)
    base = {answer.question: answer for answer in by_way.get(BASE, ())}
    return [_summarise_way(way, by_way[way.name], base) for way in ways if way.name in by_way]


def _summarise_way(
    way: LatencyWay, answers: Sequence[LatencyAnswer], base: Mapping[int, LatencyAnswer]
) -> LatencyRow:
    pairs = [(one, base[one.question]) for one in answers if one.question in base]
    seconds = [one.seconds / other.seconds for one, other in pairs]
    second = [one.second / other.second for one, other in pairs if other.second]
    deciding = [each.deciding / each.seconds for each in answers if each.deciding is not None]
    return LatencyRow(
        way.name,
        len(answers),
        seconds=median(answer.seconds for answer in answers),
        relative=median(seconds) if seconds else None,
        paper=way.paper,
        first_token=median(answer.first_token for answer in answers),
        second=fmean(answer.second for answer in answers),
        relative_second=median(second) if second else None,
        of_least=median(answer.least / answer.seconds for answer in answers),
        left=_left_shares(answers),
        deciding=fmean(deciding) if deciding else None,
        overran=sum(answer.overrun > TOLERATED_SHARE for answer in answers),
    )


def _left_shares(answers: Sequence[LatencyAnswer]) -> dict[str, float]:
    asked, left = Counter[str](), Counter[str]()
    for answer in answers:
        asked.update(answer.asked)
        left.update(answer.left)
    return {agents: left[agents] / count for agents, count in sorted(asked.items()) if left[agents]}


def show(rows: Sequence[LatencyRow], report: Report) -> None:
    report.show(
        "Latency on modelled GPUs",
        rows,
        "  seconds, first token: of a question, medians. over: all-to-all, question by "
        "question.\n  paper: Faster-MoA §5.3, at most. 2nd layer: mean of its agents, from the end "
        "of their inputs.\n  least: share of the time in which the agents on the critical path "
        "decode. left out: share of the agents of\n  that layer and size. deciding: share of a "
        "question's time by which decisions delayed it.",
    )
    for row in rows:
        if row.overran:
            report.console.print(f"{row.way}: {row.overran} answers in which a GPU was too late")


def _check(options: argparse.Namespace) -> str | None:
    if options.computed and not options.device:
        return "--computed needs a --device"
    return None


_WAYS = [way.name for way in make_ways()]
main = command(
    "moa_latency",
    __doc__,
    _measure,
    make_roles("single", plugin=True, stock=True),
    *RIG_OPTIONS,
    Option("--ways", str, _WAYS, "by default all", choices=_WAYS),
    Option("--computed", bool, about="compute all from the --device's tables; no engine runs"),
    Option("--threshold", float, None, "full: leave if Q is at least this, not by chance"),
    check=_check,
    repeats=False,
)
