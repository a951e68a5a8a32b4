"""The calls to CUDA, on a fake driver whose memory is the host's. No GPU has run them yet."""

import ctypes
import mmap
import os
import sys
from copy import copy
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashmoa_sglang.moe.asyncep import cuda
from flashmoa_sglang.moe.asyncep.cuda import CudaDevice
from flashmoa_sglang.moe.asyncep.experts import store_on_host
from flashmoa_sglang.moe.asyncep.offloader import ExpertOffloader

from tests.unit.plugin.moe.fakes import ExpertLayer

PAGE = 4096
POSIX_DESCRIPTOR = "posix file descriptor"
# Replaces a reserved mapping (mmap(2)).
MAP_FIXED = 0x10
libc_mmap = ctypes.CDLL(None).mmap
libc_mmap.restype = ctypes.c_void_p
libc_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class FakeProperties:
    """An allocation's properties. Their location becomes invalid with them."""

    def __init__(self) -> None:
        self.location = SimpleNamespace()

    def __del__(self) -> None:
        vars(self.location).clear()


class FakeAccess(SimpleNamespace):
    """A description of an access. It copies its location."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, copy(value) if name == "location" else value)


class FakeDriver:
    """The functions of cuda-python's driver API that allocate, pass on and map memory.

    Attributes:
        handles: allocations' handles that have not been released: descriptors of this process.
        refused: names of functions that fail.
    """

    CUmemAllocationProp, CUmemAccessDesc = FakeProperties, FakeAccess
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAllocationHandleType = SimpleNamespace(
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=POSIX_DESCRIPTOR
    )
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="rw")

    def __init__(self) -> None:
        self.handles: set[int] = set()
        self.mapped: dict[int, mmap.mmap] = {}
        self.accesses: list[Any] = []
        self.refused: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cuMem") and name in self.refused:
            return lambda *_: (IntEnum("CUresult", {"CUDA_ERROR_OUT_OF_MEMORY": 2})(2),)
        return super().__getattribute__(name)

    def cuMemGetAllocationGranularity(self, properties: Any, flag: int) -> tuple[int, int]:
        assert properties.type == "pinned" and flag == 1
        return 0, PAGE

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[int, int]:
        assert size % PAGE == 0 and flags == 0
        assert properties.requestedHandleTypes == POSIX_DESCRIPTOR
        assert (properties.location.type, properties.location.id) == ("device", 0)
        handle = os.memfd_create("gpu")
        os.ftruncate(handle, size)
        self.handles.add(handle)
        return 0, handle

    def cuMemExportToShareableHandle(self, handle: int, kind: str, flags: int) -> tuple[int, int]:
        assert kind == POSIX_DESCRIPTOR and flags == 0 and handle in self.handles
        return 0, os.dup(handle)

    def cuMemImportFromShareableHandle(self, descriptor: int, kind: str) -> tuple[int, int]:
        assert kind == POSIX_DESCRIPTOR
        handle = os.dup(descriptor)
        self.handles.add(handle)
        return 0, handle

    def cuMemAddressReserve(
        self, size: int, alignment: int, address: int, flags: int
    ) -> tuple[int, int]:
        assert (alignment, address, flags) == (0, 0, 0)
        memory = mmap.mmap(-1, size)
        start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self.mapped[start] = memory
        return 0, start

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[int]:
        assert (offset, flags) == (0, 0) and os.fstat(handle).st_size == size
        access, shared = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED
        assert libc_mmap(address, size, access, shared, handle, 0) == address
        return (0,)

    def cuMemSetAccess(self, address: int, size: int, accesses: Any, count: int) -> tuple[int]:
        assert address in self.mapped and size % PAGE == 0 and len(accesses) == count == 1
        self.accesses += accesses
        return (0,)

    def cuMemRelease(self, handle: int) -> tuple[int]:
        self.handles.remove(handle)
        os.close(handle)
        return (0,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver, empty = FakeDriver(), SimpleNamespace()
    for name, module in (("", empty), (".bindings", empty), (".bindings.driver", driver)):
        monkeypatch.setitem(sys.modules, f"cuda{name}", module)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "_uuid", lambda device: f"GPU-{device.index}")
    name = "_construct_storage_from_data_pointer"
    construct, cpu = getattr(torch._C, name), torch.device("cpu")
    monkeypatch.setattr(torch._C, name, lambda address, _, size: construct(address, cpu, size))
    return driver


@pytest.fixture
def gpu(driver: FakeDriver) -> CudaDevice:
    # A CPU may have a number, too.
    return CudaDevice(torch.device("cpu", 0))


def test_a_share_is_the_same_memory_in_each_process(driver: FakeDriver, gpu: CudaDevice) -> None:
    descriptor, memory = gpu.allocate_share(5000)
    memory.copy_(torch.arange(5000) % 251)
    mapped = gpu.map_share(descriptor, 5000, "GPU-0")
    os.close(descriptor)
    assert mapped.nbytes == 5000 and mapped.dtype == torch.uint8
    assert torch.equal(mapped, memory) and mapped.data_ptr() != memory.data_ptr()
    memory[4999] = 255
    assert mapped[4999] == 255
    # Only the mappings keep the memory, so that the last process that ends frees it.
    assert not driver.handles
    assert [access.location.id for access in driver.accesses] == [0, 0]


@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemMap"])
def test_a_share_that_cuda_refuses_is_an_error(
    driver: FakeDriver, gpu: CudaDevice, function: str
) -> None:
    driver.refused.add(function)
    with pytest.raises(ValueError, match=f"CUDA refuses {function}: CUDA_ERROR_OUT_OF"):
        gpu.allocate_share(5000)


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("GPU-1", r"GPU 0 cannot read the memory of GPU 1 .*nvidia-smi topo -m"),
        ("GPU-7", r"GPU GPU-7 is not visible .*--base-gpu-id"),
    ],
)
def test_a_gpu_out_of_reach_is_refused(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch, place: str, problem: str
) -> None:
    asked: list[tuple[int, int]] = []

    def can_access(own: int, peer: int) -> bool:
        asked.append((own, peer))
        return False

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_access)
    with pytest.raises(ValueError, match=problem):
        gpu.map_share(99, 5000, place)
    assert asked == ([(0, 1)] if place == "GPU-1" else [])


def test_a_missing_cuda_python_is_named(gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ValueError, match="pip install cuda-python"):
        gpu.allocate_share(1)


def test_exactly_the_requested_bytes_are_pinned(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered, codes = list[tuple[int, int, int]](), [0, 2]

    def register(address: int, size: int, flags: int) -> int:
        registered.append((address, size, flags))
        return codes.pop(0)

    cudart = SimpleNamespace(cudaHostRegister=register, cudaGetErrorString=lambda _: "no memory")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    memory = gpu.pinned_memory(5 * 4096 + 3)
    assert registered == [(memory.data_ptr(), 5 * 4096 + 3, 0)]
    # It has whole pages, so that no other memory is pinned with it.
    assert memory.nbytes == 5 * 4096 + 3 and memory.data_ptr() % 4096 == 0
    memory.fill_(7)
    assert int(memory.sum(dtype=torch.int64)) == 7 * memory.nbytes
    # Memory that cannot be pinned ends the start.
    with pytest.raises(SystemExit, match=r"does not pin 4096 bytes .*no memory.*ulimit"):
        gpu.pinned_memory(4096)


def test_experts_are_copied_in_pieces(gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_PIECE_BYTES", 64)
    copied: list[int] = []
    copy = torch.Tensor.copy_

    def copy_and_count(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        assert non_blocking
        copied.append(to.nbytes)
        return copy(to, source, non_blocking=non_blocking)

    source = (torch.arange(200) % 251).to(torch.uint8)
    target = torch.zeros(200, dtype=torch.uint8)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_and_count)
    no_stream: Any = None
    gpu.copy(no_stream, target, source)
    assert copied == [64, 64, 64, 8] and torch.equal(target, source)


@pytest.mark.parametrize(("count", "forbidden"), [(64, True), (72, True), (16, False)])
def test_the_copy_engine_is_left_to_experts(count: int, forbidden: bool) -> None:
    offloader = ExpertOffloader(ExpertLayer, "compute", 2, store_on_host)
    offloader.wrap_modules(torch.nn.Sequential(ExpertLayer(count)) for _ in range(3))
    assert not offloader.forbid_copy_engine_usage
    offloader.post_init()
    assert offloader.forbid_copy_engine_usage == forbidden
