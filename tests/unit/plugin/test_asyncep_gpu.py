"""The order of copies on a GPU, with a fake one whose streams run in any order that CUDA allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashmoa_sglang.asyncep import experts as experts_module
from flashmoa_sglang.asyncep.cuda import pinned_memory
from flashmoa_sglang.asyncep.experts import Experts, ExpertSource, HostExperts, store_on_host
from flashmoa_sglang.asyncep.offloader import ExpertOffloader
from flashmoa_sglang.asyncep.slots import StreamCopier
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugin.fake_gpu import FakeGpu

# Which stream runs first: that of the layers, or that of the copies.
COPIES_LATE, COPIES_EARLY = [0], [1]


class QueuedExperts(ExpertSource):
    """Experts whose copy to a slot is enqueued on the fake GPU, in pieces."""

    def __init__(self, experts: Experts, gpu: FakeGpu) -> None:
        self._stored = HostExperts(experts)
        self._gpu = gpu
        self.experts, self.packing, self.stored = experts, self._stored.packing, self._stored.stored

    def fill(self, memory: torch.Tensor) -> None:
        stream = self._gpu.current_stream()
        half = self.packing.bytes // 2
        for part in (slice(0, half), slice(half, self.packing.bytes)):
            stream.enqueue(lambda part=part: memory[part].copy_(self._stored._memory[part]))


class QueuedLayer(torch.nn.Module):
    """A layer that reads its weights when the fake GPU runs, as a kernel does."""

    def __init__(self, gpu: FakeGpu, number: int, fails: bool = False) -> None:
        super().__init__()
        self.gpu, self.number, self.fails = gpu, number, fails
        self.num_local_experts = 4
        self.weight = torch.nn.Parameter(torch.full((4, 64), float(number)), requires_grad=False)

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

    def __init__(self, layers: int, slots: int, failing: int | None = None) -> None:
        self.gpu = gpu = FakeGpu()
        self.layers = [QueuedLayer(gpu, n, fails=n == failing) for n in range(layers)]
        self.read: list[tuple[int, list[float]]] = []
        opened: Any = gpu
        self.offloader = ExpertOffloader(
            QueuedLayer,
            "compute",
            slots,
            lambda others: [QueuedExperts(one, gpu) for one in others],
            open_gpu=lambda _device: opened,
        )
        self.offloader.wrap_modules(torch.nn.Sequential(layer) for layer in self.layers)
        self.offloader.post_init()

    def forward(self, order: Sequence[int] | None = None, *, timed: bool = False) -> None:
        if timed:
            self.offloader.time_next(8)
        for number in range(len(self.layers)) if order is None else order:
            self.layers[number].compute(self.read)

    def all_read_their_own(self) -> bool:
        return all(values == [float(number)] for number, values in self.read)


@given(
    layers=st.integers(2, 6),
    slots=st.integers(1, 4),
    forwards=st.integers(1, 3),
    timed=st.booleans(),
    choices=st.lists(st.integers(0, 1), max_size=60),
)
def test_layers_read_their_own_experts_in_whatever_order_streams_run(
    layers: int, slots: int, forwards: int, timed: bool, choices: list[int]
) -> None:
    rig = Rig(layers, slots)
    for _ in range(forwards):
        rig.forward(timed=timed)
    rig.gpu.run(choices)
    assert len(rig.read) == 2 * layers * forwards and rig.all_read_their_own()
    assert rig.offloader.memory().misses == 0


@given(
    slots=st.integers(1, 3),
    orders=st.lists(st.lists(st.integers(0, 4), max_size=6), max_size=4),
    choices=st.lists(st.integers(0, 1), max_size=60),
)
def test_layers_out_of_order_read_their_own_experts(
    slots: int, orders: list[list[int]], choices: list[int]
) -> None:
    rig = Rig(5, slots)
    for order in orders:
        rig.forward(order)
    rig.gpu.run(choices)
    assert rig.all_read_their_own()


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("choices", [COPIES_LATE, COPIES_EARLY])
def test_a_layer_that_raises_still_protects_the_slot_that_it_reads(
    slots: int, choices: list[int]
) -> None:
    rig = Rig(5, slots, failing=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        rig.forward()
    rig.forward([4, 3, 1])
    rig.forward()
    rig.gpu.run(choices)
    assert rig.all_read_their_own()


def test_one_layer_computes_while_the_next_ones_experts_are_copied() -> None:
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


def _take_out(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(StreamCopier, name, lambda *_: None)


def _never_notes_use_after_the_start(patch: pytest.MonkeyPatch) -> None:
    note_use, fetch = StreamCopier.note_use, StreamCopier.fetch
    started: set[int] = set()

    def note_at_start(self: StreamCopier, slot: int) -> None:
        if id(self) not in started:
            note_use(self, slot)

    def note_start(self: StreamCopier, *args: Any) -> None:
        started.add(id(self))
        fetch(self, *args)

    patch.setattr(StreamCopier, "note_use", note_at_start)
    patch.setattr(StreamCopier, "fetch", note_start)


def _records_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    copy = StreamCopier._copy

    def record_first(self: StreamCopier, slot: int, *args: Any) -> None:
        self._filled_events[slot].record(self._stream)
        recorded, self._filled_events[slot] = self._filled_events[slot], self._gpu.new_event()
        copy(self, slot, *args)
        self._filled_events[slot] = recorded

    patch.setattr(StreamCopier, "_copy", record_first)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(
    "break_it",
    [
        pytest.param(_take_out("wait"), id="the computation's wait for the copy"),
        pytest.param(_take_out("_wait_until_free"), id="the copy's wait for the slot"),
        pytest.param(_never_notes_use_after_the_start, id="the note of a slot's use"),
        pytest.param(_records_before_the_copy, id="the record of the copy's end"),
    ],
)
def test_each_wait_is_needed(
    break_it: Callable[[pytest.MonkeyPatch], None],
    slots: int,
    timed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_right() -> bool:
        found = True
        for choices in (COPIES_LATE, COPIES_EARLY):
            rig = Rig(5, slots)
            for _ in range(2):
                rig.forward(timed=timed)
            rig.gpu.run(choices)
            found &= rig.all_read_their_own()
        return found

    assert is_right()
    break_it(monkeypatch)
    assert not is_right()


def test_a_first_copy_waits_for_work_that_used_the_slots_memory_before() -> None:
    gpu: Any = FakeGpu()
    done: list[str] = []
    gpu.main.enqueue(lambda: done.append("weights repacked"))
    source: Any = SimpleNamespace(
        fill=lambda _memory: gpu.current_stream().enqueue(lambda: done.append("copied"))
    )
    StreamCopier(gpu, 2).fetch(1, torch.empty(0), source)
    gpu.run(COPIES_EARLY)
    assert done == ["weights repacked", "copied"]


def fake_cudart(code: int, registered: list[tuple[int, int]]) -> Callable[[], Any]:
    def register(address: int, size: int, flags: int) -> int:
        assert flags == 0
        registered.append((address, size))
        return code

    cudart = SimpleNamespace(
        cudaHostRegister=register, cudaGetErrorString=lambda _code: "no memory"
    )
    return lambda: cudart


def test_exactly_the_bytes_that_are_asked_for_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "cudart", fake_cudart(0, registered))
    memory = pinned_memory(5 * 4096 + 3)
    assert registered == [(memory.data_ptr(), 5 * 4096 + 3)]
    # It has whole pages, so that no other memory is pinned with it.
    assert memory.nbytes == 5 * 4096 + 3 and memory.data_ptr() % 4096 == 0
    memory.fill_(7)
    assert int(memory.sum(dtype=torch.int64)) == 7 * memory.nbytes


def test_memory_that_cannot_be_pinned_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", fake_cudart(2, []))
    with pytest.raises(SystemExit, match=r"does not pin 4096 bytes .*no memory.*ulimit"):
        pinned_memory(4096)


class Layer(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_local_experts = count
        self.weight = torch.nn.Parameter(
            torch.arange(float(count * 5)).view(count, 5), requires_grad=False
        )

    def compute(self) -> float:
        return self.weight.sum().item()


def test_experts_are_copied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_module, "_PIECE", 64)
    copied: list[int] = []
    copy = torch.Tensor.copy_

    def copy_and_count(
        to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        copied.append(to.nbytes)
        return copy(to, source, non_blocking=non_blocking)

    layer = Layer(8)
    expected = layer.weight.clone()
    source = HostExperts(Experts(layer))
    slot = torch.zeros(source.packing.bytes + 100, dtype=torch.uint8)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_and_count)
    source.fill(slot)
    assert max(copied) == 64 and sum(copied) == source.packing.bytes
    assert torch.equal(source.packing.views(slot)["weight"], expected)


@pytest.mark.parametrize(("count", "forbidden"), [(64, True), (72, True), (16, False)])
def test_the_copy_engine_is_left_to_experts_if_sglang_can_do_without(
    count: int, forbidden: bool
) -> None:
    offloader = ExpertOffloader(Layer, "compute", 2, store_on_host)
    offloader.wrap_modules(torch.nn.Sequential(Layer(count)) for _ in range(3))
    assert not offloader.forbid_copy_engine_usage
    offloader.post_init()
    assert offloader.forbid_copy_engine_usage == forbidden
