"""Every call to CUDA that the offloader makes; tests replace ``CudaDevice`` by a fake."""

from __future__ import annotations

import mmap
from importlib import import_module
from typing import Any

import torch

# Other copies to the device wait for one piece, and not for a layer.
_PIECE_BYTES = 64 << 20


class CudaDevice:
    """Streams, events and memory of a GPU.

    A stream does its work in the order of enqueueing. It waits for another stream only by
    ``stream.wait_event(event)``: for the work that was enqueued before ``event.record(stream)``, or
    for nothing if the event was not recorded yet.

    Attributes:
        place: the GPU's UUID, the same in every process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.place = _uuid(device)

    @classmethod
    def of(cls, device: torch.device) -> CudaDevice | None:
        """Return the GPU of this device; ``None`` if the device is no GPU."""
        return cls(device) if device.type == "cuda" else None

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def current_stream(self) -> torch.cuda.Stream:
        """Return the stream that SGLang computes on."""
        return torch.cuda.current_stream(self._device)

    def new_event(self, *, timed: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=timed)

    def copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy of bytes on a stream, in pieces."""
        with torch.cuda.stream(stream):
            for piece, part in zip(
                target.split(_PIECE_BYTES), source.split(_PIECE_BYTES), strict=True
            ):
                piece.copy_(part, non_blocking=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def pinned_memory(self, size: int) -> torch.Tensor:
        """Allocate ``size`` bytes (uint8) of pinned memory; torch rounds up to a power of two.

        Raises: SystemExit if CUDA does not pin them.
        """
        # The mapping is shared and populated, so that a later write does not replace a pinned page.
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        memory = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
        self.pin(memory)
        return memory

    def free_host_cache(self) -> None:
        """Give pinned memory that torch keeps for later back to the system.

        SGLang pins the experts that a quantisation repacks, and torch would keep that memory.
        """
        public: Any = getattr(torch.accelerator, "empty_host_cache", None)
        internals: Any = torch._C
        (public or internals._host_emptyCache)()  # Older torch has no public name for it.

    def pin(self, memory: torch.Tensor) -> None:
        """Pin host memory that begins with a page, for the rest of the process's life.

        Raises: SystemExit if CUDA does not pin it. The process cannot go on then: torch would see
            CUDA's error at its next kernel.
        """
        cudart: Any = torch.cuda.cudart()
        code = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(code) != 0:
            raise SystemExit(
                f"--flashmoa-asyncep: CUDA does not pin {memory.nbytes} bytes of host memory "
                f"({cudart.cudaGetErrorString(code)}). Give the host memory for all experts that "
                "are not on GPUs, and raise the container's limit on locked memory (ulimit -l)."
            )

    def allocate_share(self, size: int) -> tuple[int, torch.Tensor]:
        """Allocate ``size`` bytes (uint8) of this GPU's memory that other processes can map.

        Return a file descriptor for :meth:`map_share`, which the caller closes, and the memory.

        Raises: ValueError if CUDA refuses.
        """
        properties = self._properties()
        handle = _call("cuMemCreate", self._whole_pages(size), properties, 0)
        kind = properties.requestedHandleTypes
        descriptor = int(_call("cuMemExportToShareableHandle", handle, kind, 0))
        return descriptor, self._map(handle, size)

    def map_share(self, descriptor: int, size: int, place: str) -> torch.Tensor:
        """Map ``size`` bytes (uint8) of the memory of the GPU ``place``, which may be this one.

        The memory stays valid when the descriptor is closed and when the allocating process ends:
        CUDA frees it with the last reference (cuMemRelease).

        Raises: ValueError if this GPU cannot reach that one, or CUDA refuses.
        """
        self._check_access(place)
        kind = self._properties().requestedHandleTypes
        return self._map(_call("cuMemImportFromShareableHandle", descriptor, kind), size)

    def _check_access(self, place: str) -> None:
        visible = {
            _uuid(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())
        }
        if place not in visible:
            raise ValueError(
                f"GPU {place} is not visible to this process: start all replicas with the same "
                "CUDA_VISIBLE_DEVICES, and choose each one's GPU with --base-gpu-id"
            )
        peer = visible[place]
        own = visible[self.place]
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            raise ValueError(
                f"GPU {own} cannot read the memory of GPU {peer} (cudaDeviceCanAccessPeer): choose "
                "GPUs that are connected by NVLink or below one PCIe switch (nvidia-smi topo -m), "
                "or use --flashmoa-asyncep h2d"
            )

    def _properties(self) -> Any:
        """Return the kind of memory to allocate: on this GPU, shared by a descriptor."""
        driver = _driver()
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._device.index
        kinds = driver.CUmemAllocationHandleType
        properties.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return properties

    def _whole_pages(self, size: int) -> int:
        flags = _driver().CUmemAllocationGranularity_flags
        recommended = flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        page = int(_call("cuMemGetAllocationGranularity", self._properties(), recommended))
        return -(-size // page) * page

    def _map(self, handle: Any, size: int) -> torch.Tensor:
        """Map an allocation for the rest of the process's life."""
        driver = _driver()
        whole = self._whole_pages(size)
        address = _call("cuMemAddressReserve", whole, 0, 0, 0)
        _call("cuMemMap", address, whole, 0, handle, 0)
        access = driver.CUmemAccessDesc()
        # The location is memory of the properties, which is freed with their last reference.
        properties = self._properties()
        access.location = properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _call("cuMemSetAccess", address, whole, [access], 1)
        _call("cuMemRelease", handle)
        internals: Any = torch._C
        storage = internals._construct_storage_from_data_pointer(int(address), self._device, size)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _driver() -> Any:
    """Return cuda-python's driver API. SGLang needs it, too; machines without a GPU lack it."""
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ValueError(f"cuda-python is missing ({error}): pip install cuda-python") from error


def _call(name: str, *arguments: Any) -> Any:
    """Call a function of the driver and return its result.

    Raises: ValueError if the driver refuses.
    """
    code, *results = getattr(_driver(), name)(*arguments)
    if code != 0:
        raise ValueError(f"CUDA refuses {name}: {code.name}")
    return results[0] if results else None
