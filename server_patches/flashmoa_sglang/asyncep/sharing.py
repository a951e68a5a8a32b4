"""Divides each layer's experts among replicas, which copy the others' shares from their memory.

A replica takes no part in another replica's copies, and shares never change (MoE-Prefill §6.2, with
one-sided copies instead of an all-gather). A share has a section on the replica's device, a section
in host memory, or both, each in a segment of its own. Where the device is a CPU, both are in host
memory.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flashmoa_sglang.asyncep.cuda import CudaDevice
from flashmoa_sglang.asyncep.experts import (
    ALIGNMENT,
    Experts,
    PackedExperts,
    Run,
    Where,
    allocate_on_host,
    pack,
)
from flashmoa_sglang.asyncep.replicas import CPU, Replica, ReplicaError, Share, ShareExchange
from flashmoa_sglang.asyncep.segments import GpuSegment, HostSegment, map_segment


@dataclass(frozen=True, slots=True)
class Section:
    """The part of a replica's share that is in one segment.

    Attributes:
        on_device: whether that is on the replica's device, and not in host memory.
        parts: the bytes of each layer's packed experts.
    """

    on_device: bool
    parts: Sequence[slice]

    @property
    def sizes(self) -> list[int]:
        return [part.stop - part.start for part in self.parts]


def divide(layers: Sequence[int], replica: Replica, on_device: float) -> list[Section]:
    """Return the sections of a replica's share, without empty ones.

    Args:
        layers: bytes of each layer's packed experts.
        on_device: which part of a share is on the device, from 0 to 1.
    """

    def bound(size: int, rank: int) -> int:
        return size if rank == replica.size else _align(size * rank // replica.size)

    shares = [(bound(size, replica.rank), bound(size, replica.rank + 1)) for size in layers]
    middles = [
        end if on_device == 1 else start + _align(int((end - start) * on_device))
        for start, end in shares
    ]
    starts, ends = zip(*shares, strict=True)
    sections = [
        Section(True, list(map(slice, starts, middles))),
        Section(False, list(map(slice, middles, ends))),
    ]
    return [section for section in sections if sum(section.sizes)]


def _align(size: int) -> int:
    return size // ALIGNMENT * ALIGNMENT


class Sharing:
    """Stores one replica's share of the experts of these layers, and maps the others' shares.

    Args: on_device: which part of each share is on its replica's device, the rest in host memory.
    """

    def __init__(
        self,
        layers: Sequence[PackedExperts],
        gpu: CudaDevice | None,
        replica: Replica,
        on_device: float,
    ) -> None:
        self._layers = layers
        self._gpu = gpu
        self._rank = replica.rank
        sizes = [layer.packing.bytes for layer in layers]
        self._sections = [
            divide(sizes, replace(replica, rank=rank), on_device) for rank in range(replica.size)
        ]

    def store(self) -> tuple[Share, list[torch.Tensor]]:
        """Write this replica's share, and free the layers. Return the share and its memories.

        Raises: ReplicaError if the device has no memory for it.
        """
        sections = self._sections[self._rank]
        try:
            segments = [self._new_segment(section) for section in sections]
        except ValueError as error:
            raise ReplicaError(
                f"the device cannot store this replica's share: {error}; start more replicas, or "
                "leave more in host memory with --flashmoa-asyncep hybrid"
            ) from error
        for number, layer in enumerate(self._layers):
            (packed,) = layer.runs
            for segment, section in zip(segments, sections, strict=True):
                segment.append(packed.memory[section.parts[number]])
            layer.free()
        memories = [segment.finish() for segment in segments]
        place = CPU if self._gpu is None else self._gpu.place
        return Share(place, [segment.descriptor for segment in segments]), memories

    def _new_segment(self, section: Section) -> HostSegment | GpuSegment:
        size = sum(section.sizes)
        if section.on_device and self._gpu is not None:
            return GpuSegment(size, self._gpu)
        return HostSegment(size, self._gpu)

    def map(self, rank: int, share: Share) -> list[torch.Tensor]:
        """Map the share of a replica.

        Raises: ReplicaError if it cannot be used.
        """
        try:
            return [
                self._gpu.map_share(descriptor, sum(section.sizes), share.place)
                if section.on_device and self._gpu is not None
                else map_segment(descriptor, sum(section.sizes), self._gpu)
                for section, descriptor in zip(self._sections[rank], share.descriptors, strict=True)
            ]
        except ValueError as error:
            raise ReplicaError(f"the share of replica {rank} cannot be used: {error}") from error

    def read_from(self, shares: Sequence[Sequence[torch.Tensor]]) -> None:
        """Copy the layers from the memories of these shares, in the order of ranks, from now on."""
        for layer in self._layers:
            layer.free()
        for rank, memories in enumerate(shares):
            device = Where.SHARE if rank == self._rank else Where.AT_PEERS
            for section, memory in zip(self._sections[rank], memories, strict=True):
                where = device if section.on_device else Where.ON_HOST
                pieces = memory.split(section.sizes)
                for layer, part, piece in zip(self._layers, section.parts, pieces, strict=True):
                    if piece.nbytes:
                        layer.runs.append(Run(part.start, piece, where))


def share_experts(
    layers: Sequence[Experts],
    gpu: CudaDevice | None,
    *,
    replica: Replica,
    exchange: ShareExchange,
    on_device: float,
    wait: float,
) -> list[PackedExperts]:
    """Store and offer a replica's share of the experts of these layers, and get the others' shares.

    Args: wait: seconds to wait for the other replicas.
    Raises: ReplicaError if a share cannot be stored, obtained or mapped.
    """
    packed = pack(layers, allocate_on_host, gpu)
    sharing = Sharing(packed, gpu, replica, on_device)
    exchange.introduce(_digest(packed), CPU if gpu is None else gpu.place, on_device)
    # If this replica was running before, the others still use its share.
    if share := exchange.find(time.monotonic() + wait):
        own = sharing.map(replica.rank, share)
    else:
        share, own = sharing.store()
    exchange.offer(share)
    deadline = time.monotonic() + wait
    sharing.read_from(
        [
            own if rank == replica.rank else sharing.map(rank, exchange.obtain(rank, deadline))
            for rank in range(replica.size)
        ]
    )
    return packed


def _digest(layers: Sequence[PackedExperts]) -> str:
    """Return a digest of all experts and their layout."""
    digest = hashlib.blake2b(digest_size=16)
    for layer in layers:
        (packed,) = layer.runs
        digest.update(repr(layer.packing).encode())
        digest.update(memoryview(packed.memory.numpy()))  # pyright: ignore[reportArgumentType]
    return digest.hexdigest()
