"""Compute what a mixture takes on GPUs that do nothing but compute, from their cost tables.

Requests cost nothing but their forwards here: no HTTP, no scheduler, no tokenizer. What is left is
the critical path through the agents, with the batches that they share. ``flashmoa bench
moa-latency`` compares what engines took with it; it can also compute many
questions without engines.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import count
from statistics import fmean, median
from typing import Annotated, Any, Literal, NamedTuple, Protocol, cast

from flashmoa.engine import EngineError
from flashmoa.moa import EarlyExit, Embedder, Topology
from flashmoa.moa.early_exit import compute_quality
from flashmoa_bench.harness.modelled_gpus import model_of
from flashmoa_bench.harness.report import Column
from flashmoa_bench.moa.latency_ways import BASE, LatencyWay
from flashmoa_bench.moa.rig import Serving
from flashmoa_bench.moa.script import QuestionScript
from flashmoa_bench.recorded import SIZES

# Contexts are rounded to this many tokens, so that most steps have been looked up before.
_ROUNDED = 64
# What is left of a prompt that was prefilled while it was written: the end of the chat template.
LEFT = 8


class StepTimes(Protocol):
    """The times of a model's forwards on a GPU, in seconds."""

    def prefill(self, prompts: tuple[tuple[int, int], ...]) -> float:
        """Return the time of a forward of prompts, each of cached and new tokens."""
        ...

    def decode(self, requests: int, context: int) -> float:
        """Return the time of a decode step of requests with so many tokens on average."""
        ...

    def mixed(self, prompts: tuple[tuple[int, int], ...], requests: int, context: int) -> float:
        """Return the time of a forward that is both (SGLang's mixed chunk)."""
        ...


class TabulatedTimes:
    """Times from the tables by which modelled GPUs take their time.

    Args:
        gpu, model: as of ``--device`` and ``--device-model``.

    Raises: EngineError if there are no such tables.
    """

    def __init__(self, gpu: str, model: str, tensor_parallel: int = 1) -> None:
        try:
            modelled: Any = import_module("flashmoa_sglang.modelled_gpu.gpu")
            if gpu.endswith(".json"):
                sheet, shape = modelled.Gpu.load(gpu), modelled.Model.load(model, "bfloat16")
                self._times = modelled.Roofline(sheet, shape, tensor_parallel)
            else:
                self._times = modelled.MeasuredTables(gpu, model, tensor_parallel)
        except (ImportError, ValueError) as error:
            raise EngineError(f"there are no times of {model} on {gpu}: {error}") from error
        self._forward = modelled

    def prefill(self, prompts: tuple[tuple[int, int], ...]) -> float:
        return self.mixed(prompts, 0, 0)

    def decode(self, requests: int, context: int) -> float:
        return self.mixed((), requests, context)

    def mixed(self, prompts: tuple[tuple[int, int], ...], requests: int, context: int) -> float:
        prefills = self._forward.Prefills.of(prompts)
        if requests:
            context = max(_ROUNDED, round(context / _ROUNDED) * _ROUNDED)
        return self._times.seconds(self._forward.Forward(prefills, requests, context))


@cache
def tabulated_times(gpu: str, model: str, tensor_parallel: int = 1) -> TabulatedTimes:
    """Return the times of a model on a GPU. Raises: EngineError as :class:`TabulatedTimes`."""
    return TabulatedTimes(gpu, model, tensor_parallel)


def size_times(arguments: argparse.Namespace) -> dict[str, StepTimes]:
    """Return the times of each size's model; empty without ``--device``."""
    if not arguments.device:
        return {}
    models = {size: model_of(size, arguments.device_model) for size in SIZES}
    return {
        size: tabulated_times(arguments.device, model, arguments.device_tp)
        for size, model in models.items()
    }


class Span(NamedTuple):
    """Seconds from the question to a request's first token and to its last one."""

    first: float
    end: float


@dataclass(frozen=True, slots=True)
class PlannedAgent:
    """The request of an agent.

    Attributes:
        name: the agent's name.
        engine: name of the engine that it runs on.
        known: tokens of its prompt without the answers that it reads.
        reads: names of the agents whose answers it reads.
        tokens: number of tokens that it writes.
        suffice: whether these complete answers, in their order, suffice; the other agents are then
            cancelled. ``None``: all are waited for.
    """

    name: str
    engine: str
    known: int
    reads: tuple[str, ...]
    tokens: int
    suffice: Callable[[tuple[str, ...]], bool] | None = None

    def is_ready(self, spans: Mapping[str, Span]) -> bool:
        """Return whether what it waits for is written.

        Args:
            spans: those of the requests that have ended, in their order.
        """
        complete = tuple(name for name in spans if name in self.reads)
        if len(complete) == len(self.reads):
            return True
        return bool(complete) and self.suffice is not None and self.suffice(complete)


_Work = Literal["prefill", "decode"]


class _Engine:
    """An engine that only computes; agents are known by their names.

    Args:
        pair: whether it prefills and decodes on GPUs of its own.
        overlap: whether prompts are prefilled while they are written.
        mixed: whether prefills join decode steps.
    """

    def __init__(self, times: StepTimes, *, pair: bool, overlap: bool, mixed: bool) -> None:
        self._times = times
        self._prompts: dict[str, int] = {}
        self._pair = pair
        self._overlap = overlap
        self._mixed = mixed
        self._waiting: list[PlannedAgent] = []
        # Tokens that each running request has written, and those that it will have in the end.
        self._written: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._busy: set[_Work] = set()
        # Prompts, and beginnings of prompts, that have been computed.
        self._computed: set[tuple[int, tuple[str, ...]]] = set()

    def ask(self, agent: PlannedAgent, prompt: int) -> None:
        """Add a request whose prompt, of so many tokens, is complete."""
        self._prompts[agent.name] = prompt
        self._waiting.append(agent)

    def cancel(self, name: str) -> None:
        """End a request; the forward that it is in ends as it began."""
        self._waiting = [agent for agent in self._waiting if agent.name != name]
        self._written.pop(name, None)
        self._tokens.pop(name, None)

    def begin(self) -> list[tuple[float, _Work, list[str]]]:
        """Begin what its GPUs can begin: the seconds, the work, and whose tokens it makes."""
        begun: list[tuple[float, _Work, list[str]]] = []
        if self._waiting and self._is_free("prefill"):
            agents, self._waiting = self._waiting, []
            prompts = tuple(map(self._prompt, agents))
            names = list(self._written) if self._mixed else []
            seconds = self._times.prefill(prompts)
            if names:
                seconds = self._times.mixed(prompts, len(names), self._context(names))
            for agent in agents:
                self._tokens[agent.name] = agent.tokens
            begun.append((seconds, "prefill", [*names, *(agent.name for agent in agents)]))
            self._busy.add("prefill")
        if self._written and self._is_free("decode"):
            names = list(self._written)
            seconds = self._times.decode(len(names), self._context(names))
            begun.append((seconds, "decode", names))
            self._busy.add("decode")
        return begun

    def end(self, work: _Work, names: Sequence[str]) -> list[str]:
        """End a forward. Return the requests that have got a token."""
        self._busy.remove(work)
        alive = [name for name in names if name in self._tokens]
        for name in alive:
            self._written[name] = self._written.get(name, 0) + 1
            if self._written[name] == self._tokens[name]:
                del self._written[name], self._tokens[name]
        return alive

    def _context(self, names: Sequence[str]) -> int:
        contexts = (self._prompts[name] + self._written[name] for name in names)
        return sum(contexts) // len(names)

    def _is_free(self, work: _Work) -> bool:
        return work not in self._busy if self._pair else not self._busy

    def _prompt(self, agent: PlannedAgent) -> tuple[int, int]:
        """Return how many tokens of a prompt are cached, and how many are left."""
        whole, cached = self._prompts[agent.name], 0
        if (agent.known, ()) in self._computed:
            cached = agent.known
        if (agent.known, agent.reads) in self._computed or (self._overlap and agent.reads):
            cached = whole - LEFT
        self._computed |= {(agent.known, ()), (agent.known, agent.reads)}
        cached = max(0, min(cached, whole - 1))
        return cached, whole - cached


def least_times(
    agents: Sequence[PlannedAgent],
    times: Mapping[str, StepTimes],
    *,
    overlap: bool,
    pair: bool,
    mixed: bool = False,
) -> dict[str, Span]:
    """Return when each request has written its first and its last token, in the order of the ends.

    Args:
        times: times of the engines' models, by the engines' names.
        overlap, pair, mixed: see :class:`_Engine`.
    """
    engines = {
        name: _Engine(each, pair=pair, overlap=overlap, mixed=mixed) for name, each in times.items()
    }
    by_name = {agent.name: agent for agent in agents}
    firsts: dict[str, float] = {}
    spans: dict[str, Span] = {}
    written = Counter[str]()
    later = list(agents)
    order = count()
    # The ends of forwards; those of one moment in the order in which they began.
    forwards: list[tuple[float, int, str, _Work, list[str]]] = []
    now = 0.0
    while True:
        while agent := next((each for each in later if each.is_ready(spans)), None):
            later.remove(agent)
            prompt = agent.known + sum(written[name] for name in agent.reads if name in spans)
            engines[agent.engine].ask(agent, prompt)
            left = [name for name in agent.reads if name not in spans]
            later = [each for each in later if each.name not in left]
            for name in left:
                engines[by_name[name].engine].cancel(name)
        for name, engine in engines.items():
            for seconds, work, names in engine.begin():
                heapq.heappush(forwards, (now + seconds, next(order), name, work, names))
        if not forwards:
            return spans
        now, _, name, work, names = heapq.heappop(forwards)
        for request in engines[name].end(work, names):
            firsts.setdefault(request, now)
            written[request] += 1
            if written[request] == by_name[request].tokens:
                spans[request] = Span(firsts[request], now)


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

    way: Annotated[str, Column("")]
    serving: Annotated[Serving, Column("GPUs")]
    seconds: Annotated[float, Column("seconds", "{:.2f}")]
    second: Annotated[float, Column("2nd layer", "{:.3f}")]
    relative: Annotated[float | None, Column("over all-to-all", "{:+.1%}", less=1)]
    paper: Annotated[float | None, Column("paper", "{:+.1%}", less=1)]
    left: Annotated[Mapping[str, float], Column("{} left out", "{:.0%}")]
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
