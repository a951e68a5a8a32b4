"""Test the order of copies and pinned memory, with a fake GPU that only records operations."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashmoa_sglang.asyncep import experts as experts_module
from flashmoa_sglang.asyncep.experts import Experts, HostExperts, in_host_memory, pinned
from flashmoa_sglang.asyncep.offloader import ExpertOffloader
from flashmoa_sglang.asyncep.slots import StreamCopying


class Stream:
    """A CUDA stream; ``done`` has all that must have happened before its next operation."""

    def __init__(self, _device: Any = None) -> None:
        self.done: set[str] = set()

    def wait_event(self, event: Event) -> None:
        self.done |= event.after

    def do(self, what: str) -> None:
        self.done = self.done | {what}


class Event:
    """A CUDA event; as in CUDA, waiting for one that was never recorded does nothing."""

    def __init__(self) -> None:
        self.after: set[str] = set()

    def record(self, stream: Stream) -> None:
        self.after = set(stream.done)


class Gpu:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main = self.current = Stream()
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "current_stream": lambda _device: self.current,
            "stream": self._on,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def _on(self, stream: Stream) -> Generator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def copying(self, what: str) -> Any:
        """Make a source that notes, when it is copied, which operations were done before."""
        return SimpleNamespace(fill=lambda memory: self._fill(what, memory))

    def _fill(self, what: str, memory: list[set[str]]) -> None:
        memory.append(self.current.done)
        self.current.do(what)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_the_first_copy_waits_for_earlier_uses_of_the_slots_memory(gpu: Gpu) -> None:
    gpu.main.do("weights repacked")
    before: list[Any] = []
    StreamCopying(torch.device("cuda"), 2).fetch(1, before, gpu.copying("layer 1"))  # pyright: ignore
    assert before == [{"weights repacked"}]


def test_a_copy_waits_for_its_slot_only_and_the_layer_waits_for_the_copy(gpu: Gpu) -> None:
    copies = StreamCopying(torch.device("cuda"), 2)
    before: Any = []
    gpu.main.do("layer 0 computed in slot 0")
    copies.used(0)
    gpu.main.do("layer 1 computed in slot 1")
    copies.fetch(0, before, gpu.copying("layer 2 copied"))
    # It does not wait for the layer that computes with the other slot.
    assert before == [{"layer 0 computed in slot 0"}]
    assert "layer 2 copied" not in gpu.main.done
    copies.wait(0)
    assert "layer 2 copied" in gpu.main.done


def cudart(code: int, told: list[tuple[int, int]]) -> Callable[[], Any]:
    def register(address: int, size: int, flags: int) -> int:
        assert flags == 0
        told.append((address, size))
        return code

    made = SimpleNamespace(cudaHostRegister=register, cudaGetErrorString=lambda _code: "no memory")
    return lambda: made


def test_exactly_the_requested_bytes_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "cudart", cudart(0, told))
    memory = pinned(5 * 4096 + 3)
    assert told == [(memory.data_ptr(), 5 * 4096 + 3)]
    # The memory has separate pages, so that no other memory is pinned with it.
    assert memory.nbytes == 5 * 4096 + 3 and memory.data_ptr() % 4096 == 0
    memory.fill_(7)
    assert int(memory.sum(dtype=torch.int64)) == 7 * memory.nbytes


def test_memory_that_cannot_be_pinned_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", cudart(2, []))
    with pytest.raises(SystemExit, match=r"does not pin 4096 bytes .*no memory.*ulimit"):
        pinned(4096)


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

    def counted(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copied.append(to.nbytes)
        return copy(to, source, non_blocking=non_blocking)

    layer = Layer(8)
    expected = layer.weight.clone()
    source = HostExperts(Experts(layer))
    slot = torch.zeros(source.packing.bytes + 100, dtype=torch.uint8)
    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    source.fill(slot)
    assert max(copied) == 64 and sum(copied) == source.packing.bytes
    assert torch.equal(source.packing.views(slot)["weight"], expected)


@pytest.mark.parametrize(("count", "forbidden"), [(64, True), (72, True), (16, False)])
def test_sglang_may_not_use_the_copy_engine_if_it_can_do_without(
    count: int, forbidden: bool
) -> None:
    offloader = ExpertOffloader(Layer, "compute", 2, in_host_memory)
    offloader.wrap_modules(torch.nn.Sequential(Layer(count)) for _ in range(3))
    assert not offloader.forbid_copy_engine_usage
    offloader.post_init()
    assert offloader.forbid_copy_engine_usage == forbidden
