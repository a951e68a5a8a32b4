"""Compute what a mixture takes on GPUs that do nothing but compute, from their cost tables.

Requests cost nothing but their forwards here: no HTTP, no scheduler, no tokenizer. What is left is
the critical path through the agents, with the batches that they share. ``flashmoa bench
moa-latency`` compares what engines took with it, and can compute many questions without engines.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import count
from typing import Any, Literal, Protocol

from flashmoa.engine import EngineError

# Contexts are rounded to this many tokens, so that most steps have been looked up before.
_ROUNDED = 64
# What is left of a prompt that was prefilled while it was written: the end of the chat template.
_LEFT = 8


class StepTimes(Protocol):
    """The times of a model's forwards on a GPU, in seconds."""

    def prefill(self, prompts: tuple[tuple[int, int], ...]) -> float:
        """Return the time of a forward of prompts, each of cached and new tokens."""
        ...

    def decode(self, requests: int, context: int) -> float:
        """Return the time of a decode step of requests with so many tokens on average."""
        ...


class TabulatedTimes:
    """Times from the tables by which modelled GPUs take their time.

    Args:
        gpu, model: as of ``--device`` and ``--device-model``.

    Raises: EngineError if there are no such tables.
    """

    def __init__(self, gpu: str, model: str, tensor_parallel: int = 1) -> None:
        try:
            forward: Any = import_module("flashmoa_sglang.modelled_gpu.forward")
            specs: Any = import_module("flashmoa_sglang.modelled_gpu.specs")
            if gpu.endswith(".json"):
                roofline: Any = import_module("flashmoa_sglang.modelled_gpu.roofline")
                sheet, shape = specs.Gpu.load(gpu), specs.Model.load(model, "bfloat16")
                self._times = roofline.Roofline(sheet, shape, tensor_parallel)
            else:
                tables: Any = import_module("flashmoa_sglang.modelled_gpu.tables")
                self._times = tables.MeasuredTables(gpu, model, tensor_parallel)
        except (ImportError, ValueError) as error:
            raise EngineError(f"there are no times of {model} on {gpu}: {error}") from error
        self._forward = forward

    def prefill(self, prompts: tuple[tuple[int, int], ...]) -> float:
        prefills = self._forward.Prefills.of(prompts)
        return self._times.seconds(self._forward.Forward(prefills))

    def decode(self, requests: int, context: int) -> float:
        context = max(_ROUNDED, round(context / _ROUNDED) * _ROUNDED)
        return self._times.seconds(self._forward.Forward(decodes=requests, context=context))


@cache
def tabulated_times(gpu: str, model: str, tensor_parallel: int = 1) -> TabulatedTimes:
    """Return the times of a model on a GPU. Raises: EngineError as :class:`TabulatedTimes`."""
    return TabulatedTimes(gpu, model, tensor_parallel)


@dataclass(frozen=True, slots=True)
class PlannedAgent:
    """An agent whose request is computed.

    Attributes:
        engine: name of the engine that it runs on.
        known: tokens of its prompt without the answers that it reads.
        reads: names of the agents whose answers it reads.
        tokens: length of its answer.
        needs: number of these answers that it waits for; the other agents are then cancelled.
            ``None``: all.
    """

    name: str
    engine: str
    known: int
    reads: tuple[str, ...]
    tokens: int
    needs: int | None = None

    def is_ready(self, ended: Container[str]) -> bool:
        """Return whether enough of the answers that it reads are complete."""
        complete = sum(name in ended for name in self.reads)
        return complete >= (len(self.reads) if self.needs is None else self.needs)


_Work = Literal["prefill", "decode"]


class _Engine:
    """An engine that only computes; agents are known by their names.

    Args:
        pair: whether it prefills and decodes on GPUs of its own.
        overlap: whether prompts are prefilled while they are written.
    """

    def __init__(self, times: StepTimes, *, pair: bool, overlap: bool) -> None:
        self._times = times
        self._prompts: dict[str, int] = {}
        self._pair = pair
        self._overlap = overlap
        self._waiting: list[PlannedAgent] = []
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
            seconds = self._times.prefill(tuple(map(self._prompt, agents)))
            for agent in agents:
                self._tokens[agent.name] = agent.tokens
            begun.append((seconds, "prefill", [agent.name for agent in agents]))
            self._busy.add("prefill")
        if self._written and self._is_free("decode"):
            names = list(self._written)
            contexts = (self._prompts[name] + self._written[name] for name in names)
            seconds = self._times.decode(len(names), sum(contexts) // len(names))
            begun.append((seconds, "decode", names))
            self._busy.add("decode")
        return begun

    def end(self, work: _Work, names: Sequence[str]) -> list[str]:
        """End a forward. Return the agents whose answers are complete."""
        self._busy.remove(work)
        complete: list[str] = []
        for name in names:
            if name not in self._tokens:
                continue  # It was cancelled.
            self._written[name] = self._written.get(name, 0) + 1
            if self._written[name] == self._tokens[name]:
                del self._written[name]
                complete.append(name)
        return complete

    def _is_free(self, work: _Work) -> bool:
        return work not in self._busy if self._pair else not self._busy

    def _prompt(self, agent: PlannedAgent) -> tuple[int, int]:
        """Return how many tokens of a prompt are cached, and how many are left."""
        whole, cached = self._prompts[agent.name], 0
        if (agent.known, ()) in self._computed:
            cached = agent.known
        if (agent.known, agent.reads) in self._computed or (self._overlap and agent.reads):
            cached = whole - _LEFT
        self._computed |= {(agent.known, ()), (agent.known, agent.reads)}
        cached = max(0, min(cached, whole - 1))
        return cached, whole - cached


def least_times(
    agents: Sequence[PlannedAgent],
    times: Mapping[str, StepTimes],
    *,
    overlap: bool,
    pair: bool,
) -> dict[str, float]:
    """Return the seconds from the question to the end of each agent's answer.

    Args:
        times: times of the engines' models, by the engines' names.
        overlap, pair: see :class:`_Engine`.
    """
    engines = {name: _Engine(each, pair=pair, overlap=overlap) for name, each in times.items()}
    by_name = {agent.name: agent for agent in agents}
    ends: dict[str, float] = {}
    later = list(agents)
    order = count()
    # The ends of forwards; those of one moment in the order in which they began.
    forwards: list[tuple[float, int, str, _Work, list[str]]] = []
    now = 0.0
    while True:
        for agent in [each for each in later if each.is_ready(ends)]:
            later.remove(agent)
            prompt = agent.known
            for name in agent.reads:
                if name in ends:
                    prompt += by_name[name].tokens
                else:
                    engines[by_name[name].engine].cancel(name)
            engines[agent.engine].ask(agent, prompt)
        for name, engine in engines.items():
            for seconds, work, names in engine.begin():
                heapq.heappush(forwards, (now + seconds, next(order), name, work, names))
        if not forwards:
            return ends
        now, _, name, work, names = heapq.heappop(forwards)
        for done in engines[name].end(work, names):
            ends[done] = now
