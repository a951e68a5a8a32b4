"""Each replica keeps a share of every layer's experts; the rest is copied from the others' memory.

No replica takes part in another one's copies, and what is copied never changes (MoE-Prefill §6.2,
with one-sided copies in an all-gather's place). Shares are memfds of Linux (memfd_create(2)): each
process that maps one keeps it alive, and the kernel frees it with the last of them, however they
ended, as there is no name to unlink. Nor does a container's limit on /dev/shm count for it. Its
seals (fcntl(2), "File Sealing") forbid every process to change it or to cut it short, so that a
reader depends on no other process.
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

from flashmoa_sglang.asyncep.experts import Experts, ExpertSource, Kept, Packing
from flashmoa_sglang.asyncep.replicas import ONLY_CPUS, Meeting, Replica, ReplicaError

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed(pieces: Iterable[torch.Tensor]) -> int:
    """Fill shared memory with these pieces (uint8, on the CPU); return its file descriptor."""
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


def mapped(segment: int, size: int) -> torch.Tensor:
    """Map a segment of ``size`` bytes (uint8); it stays when the descriptor is closed.

    Raises: ValueError where its size is another, or a process could still change it.
    """
    if (found := os.fstat(segment).st_size) != size:
        raise ValueError(f"the segment has {found} bytes instead of {size}")
    if fcntl.fcntl(segment, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("the segment is not sealed")
    # Copy on write, although nothing is written: torch wants memory that it may write to.
    return torch.frombuffer(mmap.mmap(segment, size, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def rows(count: int, rank: int, size: int) -> slice:
    """Return which of ``count`` experts belong to one replica."""
    return slice(count * rank // size, count * (rank + 1) // size)


@dataclass(frozen=True, slots=True)
class Part:
    """What one replica holds of one layer: these rows of its tensors, packed."""

    rows: slice
    packing: Packing


class SharedExperts(ExpertSource):
    """The experts of one layer, in as many parts as there are replicas.

    Raises: ReplicaError where there are fewer experts than replicas.
    """

    def __init__(self, experts: Experts, replica: Replica) -> None:
        self.experts = experts
        tensors = experts.tensors()
        self.packing = Packing.of(tensors)
        count = next(iter(tensors.values())).shape[0]
        if count < replica.size:
            raise ReplicaError(f"a layer of {count} experts cannot be shared by {replica.size}")
        each = [rows(count, rank, replica.size) for rank in range(replica.size)]
        self.parts = [
            Part(some, Packing.of({name: tensor[some] for name, tensor in tensors.items()}))
            for some in each
        ]
        share = self.parts[replica.rank].packing.bytes
        self.kept = Kept(
            share=share, at_peers=sum(part.packing.bytes for part in self.parts) - share
        )
        self._views: list[dict[str, torch.Tensor]] = []

    def packed(self) -> torch.Tensor:
        """Return all loaded experts of the layer."""
        memory = torch.zeros(self.packing.bytes, dtype=torch.uint8)
        self.packing.fill(memory, self.experts.tensors())
        return memory

    def share(self, rank: int, packed: torch.Tensor) -> torch.Tensor:
        """Return what one replica keeps of them."""
        part = self.parts[rank]
        memory = torch.zeros(part.packing.bytes, dtype=torch.uint8)
        tensors = self.packing.views(packed)
        part.packing.fill(memory, {name: one[part.rows] for name, one in tensors.items()})
        return memory

    def find(self, memories: Sequence[torch.Tensor]) -> None:
        """Use these pieces of memory, by rank, for the parts from now on."""
        self._views = [
            part.packing.views(memory) for part, memory in zip(self.parts, memories, strict=True)
        ]

    def fill(self, memory: torch.Tensor) -> None:
        slot = self.packing.views(memory)
        for part, tensors in zip(self.parts, self._views, strict=True):
            for name, tensor in tensors.items():
                slot[name][part.rows].copy_(tensor)


def share_with(
    layers: Sequence[Experts], replica: Replica, meeting: Meeting, wait: float
) -> list[ExpertSource]:
    """Keep a replica's share of the experts of these layers, and have the others find it.

    Args: wait: seconds for the others to come.
    Raises: ReplicaError.
    """
    if any(experts.device.type != "cpu" for experts in layers):
        raise ReplicaError(ONLY_CPUS)
    shared = [SharedExperts(experts, replica) for experts in layers]
    digest = hashlib.blake2b(digest_size=16)

    def shares() -> Iterator[torch.Tensor]:
        for one in shared:
            packed = one.packed()
            digest.update(repr(one.packing).encode())
            digest.update(memoryview(packed.numpy()))  # pyright: ignore[reportArgumentType]
            yield one.share(replica.rank, packed)
            one.experts.give_back()

    segment = sealed(shares())
    meeting.give(segment, digest.hexdigest())
    deadline = time.monotonic() + wait
    memories: list[Sequence[torch.Tensor]] = []
    for rank in range(replica.size):
        sizes = [one.parts[rank].packing.bytes for one in shared]
        segment = meeting.take(rank, deadline)
        try:
            memories.append(mapped(segment, sum(sizes)).split(sizes))
        finally:
            os.close(segment)
    for one, pieces in zip(shared, zip(*memories, strict=True), strict=True):
        one.find(pieces)
    return list(shared)
