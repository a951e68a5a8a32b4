"""Model how far replicas drift apart, and so what MoE-Prefill's hybrid (§6.3) would copy.

In that hybrid each GPU stages its 1/N of the next layers from host memory, and the other GPUs pull
it. A replica that waits for nobody copies from the host what a peer has not staged. Here, replicas
compute a mix's forwards in virtual time, behind the router's policy, as fast as modelled GPUs. The
*hit rate* p is the share of pulls whose layer the peer has staged when the pull begins.

``python -m flashmoa_bench.prefill.replica_drift`` prints p for several settings, in
some ten minutes.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from flashmoa.router.cache_tables import Blocks, EngineTraits, token_blocks
from flashmoa.router.flops import Measure, true_flops
from flashmoa.router.policy import PrefixAware, WaitingRequest
from flashmoa.router.saturation import ForwardSizes, full_load
from flashmoa_bench.modelled_gpu.gpu import Forward, MeasuredTables, Model, Prefills
from flashmoa_bench.prefill.mix import MIXES


@dataclass(frozen=True, slots=True)
class Setting:
    """What is modelled.

    Attributes:
        host, peer: seconds to copy 1/N of a layer from the host, and from a peer.
        forward: the most tokens of a forward.
        sections: staged layers of a replica: the previous one, the present one, and later ones.
        spread: part by which a layer's time varies, up and down.
        in_step: whether all replicas begin at once, and not at random times within a forward.
        cache_blocks: blocks of 16 tokens in a replica's cache.
    """

    layers: int
    host: float = 0.0
    peer: float = 0.0
    forward: int = 16_384
    sections: int = 3
    spread: float = 0.02
    in_step: bool = False
    replicas: int = 8
    cache_blocks: int = 238_000 // 16


class Simulation:
    """Computes prompts, given with their times of arrival; ``seconds`` tells a forward's time.

    Attributes:
        now: the virtual time.
        hits: of each pull, in order, whether it found the layer staged, to its end.
    """

    def __init__(
        self,
        setting: Setting,
        prompts: Sequence[tuple[float, Blocks]],
        seconds: Callable[[Forward], float],
        measure: Measure,
        seed: int = 0,
    ) -> None:
        self.setting, self.now, self.hits = setting, 0.0, list[bool]()
        self._seconds, self._dice, self._policy = seconds, random.Random(seed), PrefixAware()
        self._queue: list[WaitingRequest] = []
        full = full_load(measure, ForwardSizes(setting.forward))
        names = [f"replica {number}" for number in range(setting.replicas)]
        for name in names:
            self._policy.join(name, EngineTraits(measure, full, setting.cache_blocks))
        # Prompts, with the number of their computed tokens once they have begun.
        self._waiting = {name: deque[tuple[WaitingRequest, int | None]]() for name in names}
        # The layer that each replica has begun to fetch last, and when it has staged a later one.
        # Layer 0 stays on its GPU.
        self._windows: dict[str, tuple[int, float]] = dict.fromkeys(names, (2, 0.0))
        # When each replica begins its next layer, and so writes its next section; unknown: never.
        self._resumes, self._idle = dict.fromkeys(names, inf), set[str]()
        self._replicas = {name: self._compute(name) for name in names}
        self._order = itertools.count()
        self._events: list[tuple[float, int, Iterator[float]]] = []
        for process in (self._arrive(prompts), *self._replicas.values()):
            self._resume_at(0.0, process)

    def run(self) -> None:
        while self._events:
            self.now, _, process = heapq.heappop(self._events)
            if (time := next(process, inf)) < inf:
                self._resume_at(time, process)

    def _resume_at(self, time: float, process: Iterator[float]) -> None:
        heapq.heappush(self._events, (time, next(self._order), process))

    def _arrive(self, prompts: Sequence[tuple[float, Blocks]]) -> Iterator[float]:
        for number, (time, blocks) in enumerate(prompts):
            if time > self.now:
                self._route()
                yield time
            self._queue.append(WaitingRequest(str(number), blocks))
        self._route()

    def _route(self) -> None:
        while self._policy.takes_requests() and (placed := self._policy.route(self._queue)):
            for request in self._queue:
                if (name := placed.get(request.request)) is not None:
                    self._waiting[name].append((request, None))
                    if name in self._idle:
                        self._idle.remove(name)
                        self._resume_at(self.now, self._replicas[name])
            self._queue = [one for one in self._queue if one.request not in placed]

    def _compute(self, name: str) -> Iterator[float]:
        """Compute forwards; yield when each layer ends and the next one has its experts.

        Yield infinity while no prompt waits.
        """
        setting, last = self.setting, self.setting.layers - 1
        if not setting.in_step:
            yield self._seconds(Forward(Prefills(1, setting.forward))) * self._dice.random()
        arrivals = deque([0.0, 0.0])  # When the experts of the next layers are there.
        while True:
            while not (forward := self._begin_forward(name))[0]:
                self._idle.add(name)
                self._resumes[name] = inf
                yield inf
            parts, ended = forward
            seconds = self._seconds(Forward(Prefills.of(parts))) / setting.layers
            for layer in range(setting.layers):
                # The slot of the layer before this one is free for the layer after it.
                if layer >= 2:
                    arrivals.append(self.now + self._fetch(name, layer % last + 1))
                vary = self._dice.uniform(1 - setting.spread, 1 + setting.spread)
                arrival = 0.0 if layer == last else arrivals.popleft()
                self._resumes[name] = max(self.now + seconds * vary, arrival)
                yield self._resumes[name]
            arrivals.append(max(self.now, arrivals[0]) + self._fetch(name, 2))
            for request in ended:
                self._policy.end(request)
            self._route()

    def _begin_forward(self, name: str) -> tuple[list[tuple[int, int]], list[str]]:
        """Return the cached and new tokens of a forward's prompts, and which prompts it ends."""
        room, parts, ended = self.setting.forward, list[tuple[int, int]](), list[str]()
        waiting, table = self._waiting[name], self._policy.engines[name].blocks
        while room and waiting:
            request, done = waiting.popleft()
            blocks = request.blocks
            if done is None:
                done = blocks.cached_tokens(table.match_committed(blocks.hashes))
            parts.append((done, new := min(room, blocks.length - done)))
            room -= new
            if done + new < blocks.length:
                waiting.appendleft((request, done + new))
            else:
                table.commit(blocks.hashes)
                ended.append(request.request)
        return parts, ended

    def _fetch(self, name: str, layer: int) -> float:
        """Pull a layer from peers, and from the host what they lack; return the seconds."""
        setting, hits = self.setting, 0
        pulled = self.now + (setting.replicas - 1) * setting.peer
        for peer in self._windows.keys() - {name}:
            fetched, staged_at = self._windows[peer]
            place = (layer - fetched + (setting.sections - 1) // 2) % (setting.layers - 1)
            # The last section is being written until then, and the first is written next.
            is_old = place == 0 and self._resumes[peer] < pulled
            hit = not is_old and place < setting.sections - (staged_at > self.now)
            self.hits.append(hit)
            hits += hit
        from_host = (setting.replicas - hits) * setting.host
        self._windows[name] = layer, self.now + from_host
        return max(from_host, hits * setting.peer)


def main() -> None:
    name, gpu = "Qwen/Qwen3-235B-A22B", "h100_sxm"
    model, times = Model.load(name, "fp8_block"), MeasuredTables(gpu, name, weights="fp8_block")
    measure, part = true_flops(model.config), model.expert_bytes / 8
    blocks = [token_blocks(prompt.tokens) for prompt in MIXES["table-2"].prompts(0)]
    base = Setting(model.layers, host=part / 55e9, peer=part / 450e9)

    def play(setting: Setting, seed: int = 0, span: float = 0.0) -> Simulation:
        """Compute prompts that arrive within ``span`` seconds."""
        dice = random.Random(seed)
        arrivals = sorted(dice.random() * span for _ in blocks)
        prompts = list(zip(arrivals, blocks, strict=True))
        simulation = Simulation(setting, prompts, times.seconds, measure, seed)
        simulation.run()
        return simulation

    def show(title: str, span: float = 0.0, **changes: Any) -> None:
        runs = [play(replace(base, **changes), seed, span) for seed in range(3)]
        rates = [sum(run.hits) / len(run.hits) for run in runs]
        p = sum(rates) / len(rates)
        found = f"p {p:.2f} ({min(rates):.2f} to {max(rates):.2f})"
        print(f"{title:36}{found}, PCIe {1 - p * 7 / 8:.2f} X, {runs[0].now:.0f} s", flush=True)

    for forward in (8_192, 16_384, 32_768, 65_536):
        today = play(replace(base, forward=forward, sections=0, host=base.host / 2))
        print(f"{forward:,} tokens, half of each layer on the GPUs: {today.now:.0f} s", flush=True)
        for sections in (3, 6):
            show(f"  K = {sections}", forward=forward, sections=sections)
    print("16,384 tokens, K = 3")
    show("  begun in step", in_step=True)
    show("  begun in step, equal layer times", in_step=True, spread=0.0)
    show("  layer times vary by 10 %", spread=0.1)
    full = play(base).now
    for load in (0.7, 0.4):
        show(f"  load {load}", full / load)
    show("  K = 4", sections=4)
    show("  K = 12", sections=12)


if __name__ == "__main__":
    main()
