"""The order of copies on a GPU, and pinned memory, with a fake GPU that records what it does."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashmoa_sglang.asyncep import experts as experts_module
from flashmoa_sglang.asyncep.experts import Experts, HostExperts, allocate_pinned, store_on_host
from flashmoa_sglang.asyncep.offloader import ExpertOffloader
from flashmoa_sglang.asyncep.slots import StreamCopier


class Stream:
    """A fake stream; ``done`` is all work that precedes what is enqueued next."""

    def __init__(self, _device: Any = None) -> None:
        self.done: set[str] = set()

    def wait_event(self, event: Event) -> None:
        self.done |= event.after

    def do(self, work: str) -> None:
        self.done = self.done | {work}


class Event:
    """A fake event. As in CUDA, waiting for an event that was never recorded returns at once."""

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

    def source(self, work: str) -> Any:
        """Return a source of experts whose copy records the work before it."""
        return SimpleNamespace(fill=lambda memory: self._fill(work, memory))

    def _fill(self, work: str, memory: list[set[str]]) -> None:
        memory.append(self.current.done)
        self.current.do(work)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_a_first_copy_waits_for_work_that_used_the_slots_memory_before(gpu: Gpu) -> None:
    gpu.main.do("weights repacked")
    before: list[Any] = []
    StreamCopier(torch.device("cuda"), 2).fetch(1, before, gpu.source("layer 1"))  # pyright: ignore
    assert before == [{"weights repacked"}]


def test_a_copy_waits_for_its_slot_alone_and_the_computation_for_the_copy(gpu: Gpu) -> None:
    copier = StreamCopier(torch.device("cuda"), 2)
    before: Any = []
    gpu.main.do("layer 0 computed in slot 0")
    copier.note_use(0)
    gpu.main.do("layer 1 computed in slot 1")
    copier.fetch(0, before, gpu.source("layer 2 copied"))
    # The copy does not wait for the computation with the other slot.
    assert before == [{"layer 0 computed in slot 0"}]
    assert "layer 2 copied" not in gpu.main.done
    copier.wait(0)
    assert "layer 2 copied" in gpu.main.done


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
    memory = allocate_pinned(5 * 4096 + 3)
    assert registered == [(memory.data_ptr(), 5 * 4096 + 3)]
    # It has whole pages, so that no other memory is pinned with it.
    assert memory.nbytes == 5 * 4096 + 3 and memory.data_ptr() % 4096 == 0
    memory.fill_(7)
    assert int(memory.sum(dtype=torch.int64)) == 7 * memory.nbytes


def test_memory_that_cannot_be_pinned_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", fake_cudart(2, []))
    with pytest.raises(SystemExit, match=r"does not pin 4096 bytes .*no memory.*ulimit"):
        allocate_pinned(4096)


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
