"""The order of copies on fake GPUs, whose streams run in any order that CUDA allows."""

import os
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashmoa_sglang.moe.asyncep import replicas
from flashmoa_sglang.moe.asyncep.experts import store_on_host
from flashmoa_sglang.moe.asyncep.offloader import ExpertOffloader, Store, StreamCopier
from flashmoa_sglang.moe.asyncep.replicas import Replica, ShareExchange
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.plugin.moe.fakes import FakeGpu

LAYER_BYTES = 4 * 640 * 4


class QueuedLayer(torch.nn.Module):
    """A layer that reads its weights when the fake GPU runs, as a kernel does."""

    def __init__(self, gpu: FakeGpu, number: int, fails: bool = False) -> None:
        super().__init__()
        self.gpu, self.number, self.fails = gpu, number, fails
        self.num_local_experts = 4
        self.weight = torch.nn.Parameter(torch.full((4, 640), float(number)), requires_grad=False)

    def compute(self, read: list[tuple[int, list[float]]]) -> None:
        memory = self.weight.data
        for part in (memory[:2], memory[2:]):
            self.gpu.main.enqueue(
                lambda part=part: read.append((self.number, sorted(set(part.flatten().tolist()))))
            )
        if self.fails:
            self.fails = False
            raise RuntimeError("out of memory")


class Rig:
    """An offloader of such layers. The work of its start is enqueued but not done."""

    def __init__(
        self,
        layers: int,
        slots: int,
        failing: int | None = None,
        store: Store = store_on_host,
        gpu: Any = None,
    ) -> None:
        self.gpu = gpu = gpu or FakeGpu()
        self.layers = [QueuedLayer(gpu, n, fails=n == failing) for n in range(layers)]
        self.read: list[tuple[int, list[float]]] = []
        self.offloader = ExpertOffloader(
            QueuedLayer, "compute", slots, store, open_gpu=lambda _device: gpu
        )
        # Replicas start in threads. A guard in a thread would see the modules of other threads.
        self.offloader.wrap_modules(iter(self.layers))
        self.offloader.post_init()

    def forward(self, order: Sequence[int] | None = None, *, timed: bool = False) -> None:
        if timed:
            self.offloader.time_next(8)
        for number in range(len(self.layers)) if order is None else order:
            self.layers[number].compute(self.read)

    def all_read_their_own(self) -> bool:
        return all(values == [float(number)] for number, values in self.read)


class Group:
    """Replicas on fake GPUs that divide the experts of four layers, and their rigs."""

    def __init__(
        self, size: int, slots: int, on_device: float = 1.0, reaches: Iterable[str] | None = None
    ) -> None:
        self.name, self._size, self._slots, self._on_device = (
            uuid.uuid4().hex,
            size,
            slots,
            on_device,
        )
        self._reaches = [f"GPU-{rank}" for rank in range(size)] if reaches is None else reaches
        self.exchanges: dict[int, ShareExchange] = {}
        with ThreadPoolExecutor(size) as pool:
            started = [pool.submit(self.start, rank) for rank in range(size)]
        try:
            self.rigs = [future.result() for future in started]
        except BaseException:
            self.stop()
            raise

    def start(self, rank: int) -> Rig:
        self.exchanges[rank] = exchange = ShareExchange(Replica(self.name, rank, self._size))
        options = {"exchange": exchange, "on_device": self._on_device, "wait": 20.0}
        store = partial(replicas.share_experts, **options)
        return Rig(4, self._slots, store=store, gpu=FakeGpu(f"GPU-{rank}", self._reaches))

    def stop(self) -> None:
        for exchange in self.exchanges.values():
            exchange.close()


# The layers' stream runs first, or the copies' stream.
COPIES_LATE, COPIES_EARLY = [0], [1]


@given(
    layers=st.integers(2, 6),
    slots=st.integers(1, 4),
    # Whole forwards, or layers in any order.
    orders=st.lists(st.none(), min_size=1, max_size=3)
    | st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=4),
    timed=st.booleans(),
    choices=st.lists(st.integers(0, 1), max_size=60),
)
def test_layers_read_their_own_experts(
    layers: int, slots: int, orders: Any, timed: bool, choices: list[int]
) -> None:
    rig = Rig(layers, slots)
    for order in orders:
        rig.forward(None if order is None else [n % layers for n in order], timed=timed)
    rig.gpu.run(choices)
    assert rig.all_read_their_own()
    assert len(rig.read) == 2 * sum(layers if order is None else len(order) for order in orders)
    assert None not in orders or rig.offloader.memory()["misses"] == 0


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("choices", [COPIES_LATE, COPIES_EARLY])
def test_a_failing_layer_protects_its_slot(slots: int, choices: list[int]) -> None:
    rig = Rig(5, slots, failing=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        rig.forward()
    rig.forward([4, 3, 1])
    rig.forward()
    rig.gpu.run(choices)
    assert rig.all_read_their_own()


def test_copies_run_beside_computation() -> None:
    """With two slots, the copy for the layer after the next waits for the layer before alone."""
    rig = Rig(4, 2)
    rig.gpu.run()
    rig.forward([0, 1, 2])
    computes, copies = rig.gpu.streams
    before = copies.done
    while len(rig.read) < 4:  # Layers 0 and 1 have been computed, layer 2 not yet.
        assert computes.step()
    while copies.step():
        pass
    assert copies.done - before == 3  # A wait, and the two pieces of layer 3.
    assert len(rig.read) == 4


def test_host_caches_are_freed_after_each_layer() -> None:
    rig = Rig(5, 2)
    assert rig.gpu.freed_host_caches == len(rig.gpu.pinned) > 1


def test_first_copies_wait_for_earlier_work() -> None:
    gpu: Any = FakeGpu()
    done: list[str] = []
    gpu.main.enqueue(lambda: done.append("weights repacked"))
    gpu.copy = lambda stream, *_: stream.enqueue(lambda: done.append("copied"))
    source: Any = SimpleNamespace(copies=lambda *_: [(None, None)])
    StreamCopier(gpu, 2, ["pcie"]).fetch(1, torch.empty(0), source, timed=False)
    gpu.run(COPIES_EARLY)
    assert done == ["weights repacked", "copied"]


@settings(max_examples=40)
@given(
    size=st.integers(1, 3),
    slots=st.integers(1, 3),
    on_device=st.sampled_from([0.2, 0.5, 1.0]),
    timed=st.booleans(),
    choices=st.lists(st.integers(0, 2), max_size=60),
)
@example(2, 2, 0.5, False, [0])
@example(2, 2, 0.5, False, [1])
@example(2, 2, 0.5, False, [2])
@example(2, 2, 0.5, False, [1, 1, 1, 1, 0])
@example(2, 2, 0.5, False, [2, 2, 2, 2, 0])
def test_layers_read_experts_of_peers_and_host(
    size: int, slots: int, on_device: float, timed: bool, choices: list[int]
) -> None:
    group = Group(size, slots, on_device)
    for rig in group.rigs:
        for _ in range(2):
            rig.forward(timed=timed)
        rig.gpu.run(choices)
        assert len(rig.read) == 16 and rig.all_read_their_own()
        memory = rig.offloader.memory()
        stored = memory["on_host"] + memory["share"] + memory["at_peers"]
        assert stored == 3 * LAYER_BYTES and (memory["on_host"] > 0) == (on_device < 1)
        assert sum(pinned.nbytes for pinned in rig.gpu.pinned) == memory["on_host"]
        # Copies from peers and from the host run beside each other.
        assert len(rig.gpu.streams) == (2 if on_device == 1 else 3)
    group.stop()


def test_a_restarted_replica_gets_its_share() -> None:
    group = Group(2, 2, on_device=0.5)
    rig, ended = group.rigs
    group.exchanges[1].close()
    again = group.start(1)
    for replica in (rig, again):
        replica.forward()
        replica.gpu.run()
        assert replica.all_read_their_own()
    # Both map the same memory: nothing has been allocated a second time.
    for old, new in zip(ended.offloader._sources, again.offloader._sources, strict=True):
        for kept, mapped in zip(old.runs, new.runs, strict=True):
            assert kept.where == mapped.where
            kept.memory[0] ^= 0xFF
            assert torch.equal(kept.memory, mapped.memory)
            kept.memory[0] ^= 0xFF
    group.stop()


def test_appended_pieces_may_be_freed() -> None:
    gpu: Any = FakeGpu()
    segment = replicas.GpuSegment(8, gpu)
    for start in (0, 4):
        segment.append(piece := torch.arange(start, start + 4, dtype=torch.uint8))
        piece.fill_(99)
    assert segment.finish().tolist() == list(range(8))
    os.close(segment.descriptor)


def test_unreachable_gpus_are_refused() -> None:
    with pytest.raises(
        replicas.ReplicaError, match=r"share of replica \d cannot be used: GPU-\d cannot"
    ):
        Group(2, 2, reaches=[])
