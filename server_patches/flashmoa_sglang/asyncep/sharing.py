"""Divides each layer's experts among replicas, which copy the others' shares from their memory.

A replica takes no part in another replica's copies, and shares never change (MoE-Prefill §6.2, with
one-sided copies instead of an all-gather). A share is a memfd of Linux (memfd_create(2)). Each
process that maps it keeps it alive, and the kernel frees it with the last of them; it has no name
that would have to be unlinked, and a container's limit on /dev/shm does not apply. Its seals
(fcntl(2), "File Sealing") forbid every process to change or to truncate it, so that a reader
depends on no other process.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from flashmoa_sglang.asyncep.experts import Experts, ExpertSource, Packing, StoredBytes
from flashmoa_sglang.asyncep.replicas import ONLY_CPUS, Replica, ReplicaError, ShareExchange

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create_segment(pieces: Iterable[torch.Tensor]) -> int:
    """Write pieces (uint8, on the CPU) into a sealed memfd.

    Return its file descriptor, for the caller to close.
    """
    segment = os.memfd_create("flashmoa-experts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(segment, "wb", closefd=False) as file:
            for piece in pieces:
                file.write(memoryview(piece.numpy()))  # pyright: ignore[reportArgumentType]
        fcntl.fcntl(segment, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(segment)
        raise
    return segment


def map_segment(segment: int, size: int) -> torch.Tensor:
    """Map a segment of ``size`` bytes (uint8); the map stays valid when the descriptor is closed.

    Raises: ValueError if the segment has another size, or a process could still change it.
    """
    if (actual_size := os.fstat(segment).st_size) != size:
        raise ValueError(
            f"the segment has {actual_size} bytes instead of {size}; start all replicas with "
            "the same model and version of flashmoa-sglang"
        )
    if fcntl.fcntl(segment, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError(
            "the segment is not sealed, so that it could still change; start all replicas "
            "with the same version of flashmoa-sglang"
        )
    # Copy on write, although nothing is written: torch requires writable memory.
    return torch.frombuffer(mmap.mmap(segment, size, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def expert_rows(count: int, rank: int, size: int) -> slice:
    """Return which of a layer's ``count`` experts replica ``rank`` of ``size`` stores."""
    return slice(count * rank // size, count * (rank + 1) // size)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one layer that one replica stores: some rows of its tensors, packed."""

    rows: slice
    packing: Packing


class SharedExperts(ExpertSource):
    """Copies the experts of one layer from the parts that the replicas store.

    Raises: ReplicaError if there are fewer experts than replicas.
    """

    def __init__(self, experts: Experts, replica: Replica) -> None:
        self.experts = experts
        tensors = experts.tensors()
        self.packing = Packing.of(tensors)
        count = next(iter(tensors.values())).shape[0]
        if count < replica.size:
            raise ReplicaError(
                f"a layer of {count} experts cannot be shared by {replica.size} replicas; start at "
                f"most {count}"
            )
        rows_of_ranks = [expert_rows(count, rank, replica.size) for rank in range(replica.size)]
        self.parts = [
            Part(rows, Packing.of({name: tensor[rows] for name, tensor in tensors.items()}))
            for rows in rows_of_ranks
        ]
        share = self.parts[replica.rank].packing.bytes
        self.stored = StoredBytes(
            share=share, at_peers=sum(part.packing.bytes for part in self.parts) - share
        )
        self._views: list[dict[str, torch.Tensor]] = []

    def pack(self) -> torch.Tensor:
        """Return all loaded experts of the layer in one piece of memory."""
        memory = torch.zeros(self.packing.bytes, dtype=torch.uint8)
        self.packing.fill(memory, self.experts.tensors())
        return memory

    def pack_part(self, rank: int, packed: torch.Tensor) -> torch.Tensor:
        """Return the part of a replica, from the packed experts of the layer."""
        part = self.parts[rank]
        memory = torch.zeros(part.packing.bytes, dtype=torch.uint8)
        tensors = self.packing.views(packed)
        part.packing.fill(memory, {name: tensor[part.rows] for name, tensor in tensors.items()})
        return memory

    def read_from(self, memories: Sequence[torch.Tensor]) -> None:
        """Read the parts, in the order of ranks, from these pieces of memory from now on."""
        self._views = [
            part.packing.views(memory) for part, memory in zip(self.parts, memories, strict=True)
        ]

    def fill(self, memory: torch.Tensor) -> None:
        slot = self.packing.views(memory)
        for part, tensors in zip(self.parts, self._views, strict=True):
            for name, tensor in tensors.items():
                slot[name][part.rows].copy_(tensor)


def share_experts(
    layers: Sequence[Experts], replica: Replica, exchange: ShareExchange, wait: float
) -> list[ExpertSource]:
    """Store and offer a replica's share of the experts of these layers, and get the others' shares.

    Args: wait: seconds to wait for the other replicas.
    Raises: ReplicaError if the experts are not on CPUs, or a share cannot be obtained or mapped.
    """
    if any(experts.device.type != "cpu" for experts in layers):
        raise ReplicaError(ONLY_CPUS)
    shared_layers = [SharedExperts(experts, replica) for experts in layers]
    digest = hashlib.blake2b(digest_size=16)

    def pack_parts() -> Iterator[torch.Tensor]:
        # One layer after the other is packed and freed, so that no second copy of all is needed.
        for shared in shared_layers:
            packed = shared.pack()
            digest.update(repr(shared.packing).encode())
            digest.update(memoryview(packed.numpy()))  # pyright: ignore[reportArgumentType]
            yield shared.pack_part(replica.rank, packed)
            shared.experts.free()

    segment = create_segment(pack_parts())
    exchange.offer(segment, digest.hexdigest())
    deadline = time.monotonic() + wait
    memories: list[Sequence[torch.Tensor]] = []
    for rank in range(replica.size):
        sizes = [shared.parts[rank].packing.bytes for shared in shared_layers]
        segment = exchange.obtain(rank, deadline)
        try:
            memories.append(map_segment(segment, sum(sizes)).split(sizes))
        except ValueError as error:
            raise ReplicaError(f"the share of replica {rank} cannot be used: {error}") from error
        finally:
            os.close(segment)
    for shared, pieces in zip(shared_layers, zip(*memories, strict=True), strict=True):
        shared.read_from(pieces)
    return list(shared_layers)
