"""Engines that only take time, and a replay of requests over them; pure and deterministic.

An engine computes in forwards of up to so many tokens, in order of arrival, chunking long prompts;
a forward takes its FLOPs over the engine's rate, and never less than its floor: that of weights
which are transferred meanwhile (MoE-Prefill §6.2). Blocks can be shared from the moment they are
scheduled, as in vLLM, and with FlashMoA's plugin in SGLang.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flashmoa.router.blocks import Blocks
from flashmoa.router.flops import Measure
from flashmoa.router.policies import EngineTraits, Policy, WaitingRequest
from flashmoa_bench.prefill.mix import MixRequest


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware and the settings of a simulated engine.

    Attributes:
        measure: of its work.
        rate: work per second.
        batch_tokens: of one forward at most.
        cache_blocks: that its cache holds.
        floor: seconds of a forward at least.
        reports: whether it says what it stores and evicts.
    """

    measure: Measure
    rate: float
    batch_tokens: int
    cache_blocks: int
    floor: float = 0.0
    reports: bool = True

    def traits(self, saturation: int | None) -> EngineTraits:
        bound = None if self.reports else self.cache_blocks
        return EngineTraits(self.measure, saturation, bound)


class Cache:
    """Blocks by their last use; a prompt's end goes before its beginning."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: dict[int, None] = {}

    def match(self, hashes: Sequence[int]) -> int:
        for place, block in enumerate(hashes):
            if block not in self._held:
                return place
        return len(hashes)

    def use(self, hashes: Sequence[int]) -> list[int]:
        """Put these blocks into the cache as the last used; return those that had to go for it."""
        for block in reversed(hashes):
            self._held.pop(block, None)
            self._held[block] = None
        surplus = max(0, len(self._held) - self._capacity)
        gone = [block for block, _ in zip(self._held, range(surplus), strict=False)]
        for block in gone:
            del self._held[block]
        return gone


@dataclass(slots=True)
class _Job:
    ask: MixRequest
    done: int = 0
    blocks_done: int = 0


@dataclass(slots=True)
class Step:
    """One forward: how long it takes, what it stores and evicts, and whose prompts it completes."""

    seconds: float
    stored: list[int] = field(default_factory=list[int])
    evicted: list[int] = field(default_factory=list[int])
    completed: list[MixRequest] = field(default_factory=list[MixRequest])


class SimulatedEngine:
    """An engine that adds up ``cached`` and ``prompt`` tokens, ``work`` and ``busy`` seconds."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.cached = self.prompt = self.work = self.steps = 0
        self.busy = 0.0
        self._cache = Cache(machine.cache_blocks)
        self._queue: deque[_Job] = deque()

    def submit(self, ask: MixRequest) -> None:
        self._queue.append(_Job(ask))

    def step(self) -> Step | None:
        """Compute the next forward, if there is anything to compute."""
        if not self._queue:
            return None
        step, room, work = Step(0.0), self.machine.batch_tokens, 0
        while room > 0 and self._queue:
            job = self._queue[0]
            if job.done == 0:
                self._admit(job)
            tokens = min(room, job.ask.blocks.length - job.done)
            work += self.machine.measure.work(job.done, job.done + tokens)
            room -= tokens
            job.done += tokens
            self._store(job, step)
            if job.done >= job.ask.blocks.length:
                step.completed.append(self._queue.popleft().ask)
        step.seconds = max(self.machine.floor, work / self.machine.rate)
        self.work += work
        self.busy += step.seconds
        self.steps += 1
        return step

    def _admit(self, job: _Job) -> None:
        blocks = job.ask.blocks
        job.blocks_done = self._cache.match(blocks.hashes)
        job.done = blocks.cached_tokens(job.blocks_done)
        self.cached += job.done
        self.prompt += blocks.length

    def _store(self, job: _Job, step: Step) -> None:
        blocks = job.ask.blocks
        whole = min(job.done // blocks.size, len(blocks.hashes))
        step.stored += blocks.hashes[job.blocks_done : whole]
        job.blocks_done = max(whole, job.blocks_done)
        step.evicted += self._cache.use(blocks.hashes[: job.blocks_done])


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """A replay's result.

    Attributes:
        seconds: until the last prompt was computed.
        tokens: of all prompts.
        cached: of these, not computed.
        work: done by all engines.
        imbalance: the busiest engine's seconds over the mean.
        steps: forwards of all engines.
    """

    seconds: float
    tokens: int
    cached: int
    work: int
    imbalance: float
    steps: int

    @property
    def throughput(self) -> float:
        """Return the prompt tokens per second."""
        return self.tokens / self.seconds

    @property
    def hit_rate(self) -> float:
        return self.cached / self.tokens


def replay(
    asks: Iterable[MixRequest],
    policy: Policy,
    machines: Mapping[str, Machine],
    *,
    saturation: int | None = None,
    concurrency: int,
) -> ReplayOutcome:
    """Replay all requests as fast as they go, ``concurrency`` of them at a time.

    Args:
        saturation: ``T`` of every engine, for policies that look at it.
    """
    return _Replay(policy, machines, saturation).run(deque(asks), concurrency)


class _Replay:
    def __init__(
        self, policy: Policy, machines: Mapping[str, Machine], saturation: int | None
    ) -> None:
        self._policy = policy
        self._engines = {name: SimulatedEngine(machine) for name, machine in machines.items()}
        # Forwards that run, by when they end.
        self._running: list[tuple[float, str, Step]] = []
        self._idle = set(self._engines)
        self._asks: dict[str, MixRequest] = {}
        self._queue: list[WaitingRequest] = []
        for name, machine in machines.items():
            policy.join(name, machine.traits(saturation))

    def run(self, coming: deque[MixRequest], concurrency: int) -> ReplayOutcome:
        now = 0.0
        self._feed(coming, concurrency, now)
        while self._running:
            now, name, step = heapq.heappop(self._running)
            self._finish(name, step)
            self._feed(coming, concurrency, now)
        if self._asks:
            raise RuntimeError(f"{len(self._asks)} requests never had an engine")
        return self._outcome(now)

    def _outcome(self, seconds: float) -> ReplayOutcome:
        engines = self._engines.values()
        busy = [engine.busy for engine in engines]
        return ReplayOutcome(
            seconds=seconds,
            tokens=sum(engine.prompt for engine in engines),
            cached=sum(engine.cached for engine in engines),
            work=sum(engine.work for engine in engines),
            imbalance=max(busy) * len(busy) / sum(busy) if any(busy) else 1.0,
            steps=sum(engine.steps for engine in engines),
        )

    def _feed(self, coming: deque[MixRequest], concurrency: int, now: float) -> None:
        """Let in what may be open, route what can be, and have idle engines begin."""
        while coming and len(self._asks) < concurrency:
            ask = coming.popleft()
            self._asks[ask.name] = ask
            self._queue.append(WaitingRequest(ask.name, ask.blocks))
        placed = self._policy.route(self._queue)
        self._queue = [one for one in self._queue if one.request not in placed]
        for request, engine in placed.items():
            self._engines[engine].submit(self._asks[request])
        for name in sorted(self._idle):
            if (step := self._engines[name].step()) is not None:
                self._idle.discard(name)
                heapq.heappush(self._running, (now + step.seconds, name, step))

    def _finish(self, name: str, step: Step) -> None:
        self._idle.add(name)
        if self._engines[name].machine.reports:
            self._policy.add_blocks(name, step.stored)
            self._policy.remove_blocks(name, step.evicted)
        for ask in step.completed:
            self._policy.finish_prefill(ask.name)
            self._policy.end(ask.name)
            del self._asks[ask.name]


def best_hit_rate(prompts: Iterable[Blocks]) -> float:
    """Return the hit rate of one engine whose cache forgets nothing."""
    seen: set[int] = set()
    cached = total = 0
    for blocks in prompts:
        matched = next((n for n, one in enumerate(blocks.hashes) if one not in seen), None)
        cached += blocks.cached_tokens(len(blocks.hashes) if matched is None else matched)
        total += blocks.length
        seen.update(blocks.hashes)
    return cached / total
