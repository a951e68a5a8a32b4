"""Simulate engines and replay requests over them; pure and deterministic.

A simulated engine computes requests in order of arrival, in forwards of limited size, and chunks
long prompts. It builds the next forward when one begins, as SGLang's overlap schedule does.
Requests can share blocks as soon as these are scheduled, as in vLLM, and in SGLang with FlashMoA's
plugin, and engines report these blocks then.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from flashmoa.router.blocks import Blocks
from flashmoa.router.flops import Measure
from flashmoa.router.policies import EngineTraits, Policy, WaitingRequest
from flashmoa_bench.prefill.mix import MixRequest

# Returns the seconds of a forward, given the cached and the new tokens of each of its prompts.
ForwardTimes = Callable[[tuple[tuple[int, int], ...]], float]


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware and the settings of a simulated engine.

    Attributes:
        measure: measures work, for policies that balance it.
        times: says how long forwards take.
        batch_tokens: most tokens of a forward.
        cache_blocks: most blocks that its cache holds.
        reports: whether it reports the blocks that it stores and evicts.
    """

    measure: Measure
    times: ForwardTimes
    batch_tokens: int
    cache_blocks: int
    reports: bool = True

    def traits(self, saturation: int | None) -> EngineTraits:
        bound = None if self.reports else self.cache_blocks
        return EngineTraits(self.measure, saturation, bound)


class Cache:
    """Holds blocks, and evicts those used longest ago; of a prompt, the last block first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # The keys are ordered by last use.
        self._held: dict[int, None] = {}

    def match(self, hashes: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks are held."""
        for place, block in enumerate(hashes):
            if block not in self._held:
                return place
        return len(hashes)

    def use(self, hashes: Sequence[int]) -> list[int]:
        """Hold a prompt's blocks as the last used ones; return those evicted for them."""
        for block in reversed(hashes):
            self._held.pop(block, None)
            self._held[block] = None
        surplus = max(0, len(self._held) - self._capacity)
        evicted = list(islice(self._held, surplus))
        for block in evicted:
            del self._held[block]
        return evicted


@dataclass(slots=True)
class _Job:
    """A request in an engine's queue, and how many of its tokens and blocks are computed."""

    request: MixRequest
    done: int = 0
    blocks_done: int = 0


@dataclass(slots=True)
class Step:
    """One forward: its seconds, the blocks it stores and evicts, and the prompts it completes."""

    seconds: float
    stored: list[int] = field(default_factory=list[int])
    evicted: list[int] = field(default_factory=list[int])
    completed: list[MixRequest] = field(default_factory=list[MixRequest])


class SimulatedEngine:
    """Computes requests in simulated time, and counts tokens, seconds and forwards.

    Attributes:
        cached, prompt: tokens that were cached, and tokens of all prompts.
        busy: seconds of all forwards.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.cached = self.prompt = self.steps = 0
        self.busy = 0.0
        self._cache = Cache(machine.cache_blocks)
        self._queue: deque[_Job] = deque()

    def submit(self, request: MixRequest) -> None:
        self._queue.append(_Job(request))

    def build(self) -> Step | None:
        """Build the next forward; return ``None`` if there is nothing to compute."""
        if not self._queue:
            return None
        step, room = Step(0.0), self.machine.batch_tokens
        parts: list[tuple[int, int]] = []
        while room > 0 and self._queue:
            job = self._queue[0]
            if job.done == 0:
                self._admit(job)
            tokens = min(room, job.request.blocks.length - job.done)
            parts.append((job.done, tokens))
            room -= tokens
            job.done += tokens
            self._store(job, step)
            if job.done >= job.request.blocks.length:
                step.completed.append(self._queue.popleft().request)
        step.seconds = self.machine.times(tuple(parts))
        self.busy += step.seconds
        self.steps += 1
        return step

    def _admit(self, job: _Job) -> None:
        blocks = job.request.blocks
        job.blocks_done = self._cache.match(blocks.hashes)
        job.done = blocks.cached_tokens(job.blocks_done)
        self.cached += job.done
        self.prompt += blocks.length

    def _store(self, job: _Job, step: Step) -> None:
        blocks = job.request.blocks
        whole = min(job.done // blocks.size, len(blocks.hashes))
        step.stored += blocks.hashes[job.blocks_done : whole]
        job.blocks_done = max(whole, job.blocks_done)
        step.evicted += self._cache.use(blocks.hashes[: job.blocks_done])


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """The result of a replay.

    Attributes:
        seconds: simulated time until the last prompt was computed.
        tokens: number of tokens of all prompts.
        cached: number of these that were cached and not computed.
        imbalance: busy time of the busiest engine over the mean.
        steps: number of forwards of all engines.
        waits: each request's seconds, from when it was sent to its answer.
    """

    seconds: float
    tokens: int
    cached: int
    imbalance: float
    steps: int
    waits: Sequence[float]

    @property
    def throughput(self) -> float:
        """Return the prompt tokens per second."""
        return self.tokens / self.seconds

    @property
    def hit_rate(self) -> float:
        return self.cached / self.tokens


def replay(
    requests: Iterable[MixRequest],
    policy: Policy,
    machines: Mapping[str, Machine],
    *,
    saturation: int | None = None,
    concurrency: int,
) -> ReplayOutcome:
    """Replay all requests, of which ``concurrency`` are in progress at a time.

    Args:
        saturation: ``T`` of every engine, for policies that use it.

    Raises: RuntimeError if the policy leaves requests without an engine.
    """
    return _Replay(policy, machines, saturation).run(deque(requests), concurrency)


class _Replay:
    """Advances simulated time from the end of one forward to the next."""

    def __init__(
        self, policy: Policy, machines: Mapping[str, Machine], saturation: int | None
    ) -> None:
        self._policy = policy
        self._engines = {name: SimulatedEngine(machine) for name, machine in machines.items()}
        # The forwards in progress, with the time when each ends and the engine's name; a heap.
        self._running: list[tuple[float, str, Step]] = []
        self._idle = set(self._engines)
        # The forwards that follow them and are built already.
        self._next: dict[str, Step | None] = {}
        # The requests in progress, with the time when each was sent.
        self._requests: dict[str, tuple[MixRequest, float]] = {}
        # Those of them that have no engine yet.
        self._unrouted: list[WaitingRequest] = []
        self._waits: list[float] = []
        for name, machine in machines.items():
            policy.join(name, machine.traits(saturation))

    def run(self, coming: deque[MixRequest], concurrency: int) -> ReplayOutcome:
        now = 0.0
        self._advance(coming, concurrency, now)
        while self._running:
            now, name, step = heapq.heappop(self._running)
            self._finish(name, step, now)
            self._advance(coming, concurrency, now)
        if self._requests:
            raise RuntimeError(f"{len(self._requests)} requests never had an engine")
        return self._summarise(now)

    def _summarise(self, seconds: float) -> ReplayOutcome:
        engines = self._engines.values()
        busy = [engine.busy for engine in engines]
        return ReplayOutcome(
            seconds=seconds,
            tokens=sum(engine.prompt for engine in engines),
            cached=sum(engine.cached for engine in engines),
            imbalance=max(busy) * len(busy) / sum(busy) if any(busy) else 1.0,
            steps=sum(engine.steps for engine in engines),
            waits=self._waits,
        )

    def _advance(self, coming: deque[MixRequest], concurrency: int, now: float) -> None:
        """Admit as many requests as may be in progress, route them, and start idle engines."""
        new: list[WaitingRequest] = []
        while coming and len(self._requests) < concurrency:
            request = coming.popleft()
            self._requests[request.name] = (request, now)
            new.append(WaitingRequest(request.name, request.blocks))
        self._unrouted += new
        # As the dispatcher does: while all engines are full, only a request that has come may go.
        queue = self._unrouted if self._policy.takes_requests() else new
        if queue and (routed := self._policy.route(queue)):
            self._unrouted = [each for each in self._unrouted if each.request not in routed]
            for name, engine in routed.items():
                self._engines[engine].submit(self._requests[name][0])
        for name in sorted(self._idle):
            if (step := self._next.pop(name, None) or self._build(name)) is not None:
                self._idle.discard(name)
                heapq.heappush(self._running, (now + step.seconds, name, step))
                self._next[name] = self._build(name)

    def _build(self, name: str) -> Step | None:
        step = self._engines[name].build()
        if step is not None and self._engines[name].machine.reports:
            self._policy.add_blocks(name, step.stored)
            self._policy.remove_blocks(name, step.evicted)
        return step

    def _finish(self, name: str, step: Step, now: float) -> None:
        self._idle.add(name)
        for ask in step.completed:
            self._policy.finish_prefill(ask.name)
            self._policy.end(ask.name)
            _, sent = self._requests.pop(ask.name)
            self._waits.append(now - sent)


def best_hit_rate(prompts: Iterable[Blocks]) -> float:
    """Return the hit rate of a single engine that evicts nothing."""
    seen: set[int] = set()
    cached = total = 0
    for blocks in prompts:
        matched = next((n for n, one in enumerate(blocks.hashes) if one not in seen), None)
        cached += blocks.cached_tokens(len(blocks.hashes) if matched is None else matched)
        total += blocks.length
        seen.update(blocks.hashes)
    return cached / total
