"""Layers and replicas of layers whose work and copies are enqueued on fake GPUs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from flashmoa_sglang.asyncep.experts import store_on_host
from flashmoa_sglang.asyncep.offloader import ExpertOffloader, Marks, Store, StreamCopier
from flashmoa_sglang.asyncep.replicas import Replica, ShareExchange, share_experts

from tests.unit.plugin.fake_gpu import FakeGpu

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
    """An offloader of such layers, with the work of its start enqueued but not done."""

    def __init__(
        self,
        layers: int,
        slots: int,
        failing: int | None = None,
        store: Store = store_on_host,
        gpu: FakeGpu | None = None,
    ) -> None:
        self.gpu = gpu or FakeGpu()
        self.layers = [QueuedLayer(self.gpu, n, fails=n == failing) for n in range(layers)]
        self.read: list[tuple[int, list[float]]] = []
        opened: Any = self.gpu
        self.offloader = ExpertOffloader(
            QueuedLayer, "compute", slots, store, open_gpu=lambda _device: opened
        )
        # Replicas start in threads, where each one's guard would see the others' modules be nested.
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
    """Replicas on fake GPUs that divide the layers' experts, and their rigs."""

    def __init__(
        self,
        size: int,
        layers: int,
        slots: int,
        on_device: float = 1.0,
        reaches: Iterable[str] | None = None,
    ) -> None:
        self.name = uuid.uuid4().hex
        places = [f"GPU-{rank}" for rank in range(size)]
        self._reaches = places if reaches is None else reaches
        self._size, self._layers, self._slots, self._on_device = size, layers, slots, on_device
        self.exchanges: dict[int, ShareExchange] = {}
        with ThreadPoolExecutor(size) as pool:
            started = [pool.submit(self.start, rank) for rank in range(size)]
        try:
            self.rigs = [future.result() for future in started]
        except BaseException:
            self.stop()
            raise

    def start(self, rank: int) -> Rig:
        replica = Replica(self.name, rank, self._size)
        self.exchanges[rank] = ShareExchange(replica)
        store = partial(
            share_experts,
            exchange=self.exchanges[rank],
            on_device=self._on_device,
            wait=20.0,
        )
        gpu = FakeGpu(f"GPU-{rank}", self._reaches)
        return Rig(self._layers, self._slots, store=store, gpu=gpu)

    def stop(self) -> None:
        for exchange in self.exchanges.values():
            exchange.close()


def take_out(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(StreamCopier, name, lambda *_: None)


def _never_notes_use_after_the_start(patch: pytest.MonkeyPatch) -> None:
    note_use, fetch = StreamCopier.note_use, StreamCopier.fetch
    started: set[int] = set()

    def note_at_start(self: StreamCopier, slot: int) -> None:
        if id(self) not in started:
            note_use(self, slot)

    def note_start(self: StreamCopier, *args: Any, timed: bool) -> list[Marks]:
        started.add(id(self))
        return fetch(self, *args, timed=timed)

    patch.setattr(StreamCopier, "note_use", note_at_start)
    patch.setattr(StreamCopier, "fetch", note_start)


def _records_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    copy = StreamCopier._copy

    def record_first(self: StreamCopier, slot: int, channel: str, *args: Any) -> None:
        events = self._filled_events[slot]
        events[channel].record(self._streams[channel])
        recorded, events[channel] = events[channel], self._gpu.new_event()
        copy(self, slot, channel, *args)
        events[channel] = recorded

    patch.setattr(StreamCopier, "_copy", record_first)


# What takes out each wait that any copy needs.
HAZARDS = [
    pytest.param(take_out("wait"), id="the computation's wait for the copy"),
    pytest.param(take_out("_wait_until_free"), id="the copy's wait for the slot"),
    pytest.param(_never_notes_use_after_the_start, id="the note of a slot's use"),
    pytest.param(_records_before_the_copy, id="the record of the copy's end"),
]
