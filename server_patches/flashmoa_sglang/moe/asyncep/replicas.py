"""Replicas of a model on one machine, which divide each layer's experts among themselves.

A replica copies the others' shares from their memory. It takes no part in another replica's copies,
and shares never change (MoE-Prefill §6.2, with one-sided copies instead of an all-gather). A share
has a section on the replica's device, a section in host memory, or both, each in a segment of its
own. Where the device is a CPU, both are in host memory.

A segment is memory of a GPU (cuMemExportToShareableHandle), or a memfd of Linux (memfd_create(2)).
Other processes map it by its descriptor. The kernel frees it with the last process that maps it. It
has no name that would have to be unlinked, and a container's limit on /dev/shm does not apply.

Every replica listens on a Unix socket in Linux's abstract namespace (unix(7)), which is not a file
and disappears with the process. A peer that connects introduces itself and gets file descriptors of
a share. After that the two processes do not depend on each other. A replica that has ended can be
started again, and then asks for the shares again: first for its own, which the others still use.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from flashmoa_sglang.moe.asyncep.cuda import CudaDevice
from flashmoa_sglang.moe.asyncep.experts import ALIGNMENT, Experts, PackedExperts, Run, Where, pack
from flashmoa_sglang.sglang.options import Options

logger = logging.getLogger(__name__)

# The place of shares that are on no GPU.
CPU = "cpu"
_ANSWER_TIMEOUT_SECONDS = 5.0
_MAX_MESSAGE_BYTES = 4096
# Fields of ``Introduction`` that all replicas of a group have in common, and the remedies.
_IN_COMMON = {
    "size": "--flashmoa-asyncep-replica must give one number after the / in all of them",
    "experts": (
        "they have not loaded the same experts; start all of a group with the same model, dtype "
        "and quantization, and all on GPUs of this machine"
    ),
    "on_device": (
        "--flashmoa-asyncep and --flashmoa-asyncep-on-device must be the same in all of them"
    ),
}


class ReplicaError(SystemExit):
    """Ends a replica that cannot join its group; the message says what to do."""

    def __init__(self, problem: str) -> None:
        mode = Options.from_environment().asyncep
        super().__init__(f"--flashmoa-asyncep {mode}: {problem.rstrip('.')}.")


@dataclass(frozen=True, slots=True)
class Replica:
    """Replica ``rank`` (from 0) of the ``size`` replicas in a group.

    Only the name keeps groups apart: several groups on a machine may run the same model.
    """

    group: str
    rank: int
    size: int

    @property
    def address(self) -> str:
        return f"\0flashmoa-asyncep/{os.getuid()}/{self.group}/{self.rank}"

    def __str__(self) -> str:
        return f"replica {self.rank} of {self.size} in group {self.group!r}"


@dataclass(frozen=True, slots=True)
class Share:
    """The segments of a replica's share: one on a device, one in host memory, or both.

    Attributes:
        place: the UUID of the GPU with the segment on a device, or ``CPU``.
        descriptors: the segments' file descriptors.
    """

    place: str
    descriptors: Sequence[int]


@dataclass(frozen=True, slots=True)
class Introduction:
    """The first message between two replicas: a question or its answer.

    Attributes:
        experts: digest of all loaded experts, and of the kind of device.
        on_device: the part of each share that is on a device.
        share: the rank whose share is asked for, or comes with this message.
        place: the place of that share; in a question, the replica's own device.
    """

    rank: int
    size: int
    experts: str
    on_device: float
    share: int
    place: str

    @classmethod
    def parse(cls, message: bytes) -> Introduction:
        try:
            return cls(**json.loads(message))
        except (TypeError, ValueError) as error:
            raise ReplicaError(
                f"the message {message[:80]!r} is from no replica of this version: run one version "
                "of flashmoa-sglang in all replicas, or choose another --flashmoa-asyncep-group"
            ) from error

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def problem(self, other: Introduction) -> str | None:
        """Return why two replicas do not belong together; ``None`` if they do."""
        for name, remedy in _IN_COMMON.items():
            if getattr(other, name) != getattr(self, name):
                return f"replicas {other.rank} and {self.rank} do not belong together: {remedy}"
        return None


class ShareExchange:
    """Offers a replica's share to the others of its group, and gets theirs.

    Raises: ReplicaError if another process has the replica's place in the group.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._problem = ""
        self._refused = threading.Event()
        self._thread: threading.Thread | None = None
        self._own: Introduction
        # The stored and obtained shares by rank, to give them to others.
        self._shares: dict[int, Share] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(replica.address)
        except OSError as error:
            self._socket.close()
            if error.errno != errno.EADDRINUSE:
                raise
            raise ReplicaError(
                f"{replica} runs already: give each replica its own --flashmoa-asyncep-replica, or "
                "choose another --flashmoa-asyncep-group"
            ) from error

    def introduce(self, experts: str, place: str, on_device: float) -> None:
        """Set this replica's ``Introduction``, before the other calls."""
        rank, size = self.replica.rank, self.replica.size
        self._own = Introduction(rank, size, experts, on_device, rank, place)

    def find(self, deadline: float) -> Share | None:
        """Return this replica's share if another replica still has it since before a restart.

        Raises: ReplicaError at the deadline, in :func:`time.monotonic`'s seconds, if a replica runs
            but does not answer, or if one of the replicas refuses the other.
        """
        rank = self.replica.rank
        peers = (peer for peer in range(self.replica.size) if peer != rank)
        asked = (self._ask_again(peer, rank, deadline, may_lack=True) for peer in peers)
        return next(filter(None, asked), None)

    def offer(self, share: Share) -> None:
        """Give this replica's share to every replica that asks; :meth:`close` closes it."""
        self._shares[self.replica.rank] = share
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def obtain(self, rank: int, deadline: float) -> Share:
        """Wait for the share of another replica; :meth:`close` closes its descriptors.

        Raises: ReplicaError at the deadline, in :func:`time.monotonic`'s seconds, or if one of the
            replicas refuses another.
        """
        share = self._ask_again(rank, rank, deadline, may_lack=False)
        assert share is not None
        self._shares[rank] = share
        return share

    def _ask_again(self, peer: int, rank: int, deadline: float, *, may_lack: bool) -> Share | None:
        """Ask a replica for the share of a rank until it answers.

        Args: may_lack: return ``None`` if the replica has ended or does not have the share.
        """
        warned = False
        while True:
            try:
                share = self._ask(peer, rank)
                if share is not None or may_lack:
                    return share
            except ConnectionRefusedError:  # It does not listen yet, or has ended.
                if may_lack:
                    return None
            except (ConnectionError, TimeoutError, BlockingIOError):
                pass
            if not warned:
                text = "%s waits for replica %d; start it now if it is not running"
                logger.warning(text, self.replica, peer)
                warned = True
            if self._refused.wait(timeout=0.1):
                raise ReplicaError(self._problem)
            if time.monotonic() > deadline:
                raise ReplicaError(
                    f"{self.replica} has waited too long for replica {peer}: start replica {peer} "
                    "on this machine, with the same --flashmoa-asyncep-group. End it if it hangs."
                )

    def close(self) -> None:
        if self._thread is not None:
            self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join()
        self._socket.close()
        for share in self._shares.values():
            for descriptor in share.descriptors:
                os.close(descriptor)

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL means that the socket was closed.
                    text = "%s can no longer give its share to other replicas: %s"
                    logger.error(text, self.replica, error)
                return
            with peer:
                try:
                    self._answer(peer)
                except (OSError, ReplicaError) as error:
                    text = "%s could not give its share to another replica: %s"
                    logger.warning(text, self.replica, error)

    def _answer(self, peer: socket.socket) -> None:
        peer.settimeout(_ANSWER_TIMEOUT_SECONDS)
        _check_user(peer)
        message = peer.recv(_MAX_MESSAGE_BYTES)
        if not message:  # The peer has disconnected.
            return
        own, question = self._own, Introduction.parse(message)
        problem, share = own.problem(question), self._shares.get(question.share)
        if problem or share is None:
            answer, descriptors = own, []
        else:
            answer = replace(own, share=question.share, place=share.place)
            descriptors = share.descriptors
        # The peer is answered first, because the problem ends this process if it is still starting.
        socket.send_fds(peer, [answer.encode()], descriptors)
        if problem:
            logger.error("%s has refused another replica: %s", self.replica, problem)
            self._problem = problem
            self._refused.set()

    def _ask(self, peer: int, rank: int) -> Share | None:
        """Ask a replica for the share of a rank; return ``None`` if it does not have it."""
        own = self._own
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_ANSWER_TIMEOUT_SECONDS)
            connection.connect(replace(self.replica, rank=peer).address)
            _check_user(connection)
            connection.send(replace(own, share=rank).encode())
            message, descriptors, _, _ = socket.recv_fds(
                connection, _MAX_MESSAGE_BYTES, maxfds=2, flags=socket.MSG_CMSG_CLOEXEC
            )
        if not message:
            raise ConnectionResetError(f"replica {peer} ended")
        answer = Introduction.parse(message)
        if problem := own.problem(answer):
            raise ReplicaError(problem)
        return Share(answer.place, descriptors) if answer.share == rank else None


def _check_user(peer: socket.socket) -> None:
    """Check that a peer belongs to this user, since abstract sockets have no file permissions.

    Raises: ReplicaError if it belongs to another user.
    """
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if user != os.getuid():
        raise ReplicaError(
            f"the other replica belongs to user {user}, this one to {os.getuid()}: run all "
            "replicas as one user"
        )


class HostSegment:
    """A segment of host memory that is written once; its size in bytes is sealed (fcntl(2)).

    Without a GPU, its content is sealed, too. CUDA pins only memory that a process could write.
    """

    def __init__(self, size: int, gpu: CudaDevice | None = None) -> None:
        self.descriptor = os.memfd_create("flashmoa-experts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._size, self._gpu = size, gpu

    def append(self, piece: torch.Tensor) -> None:
        with open(self.descriptor, "ab", closefd=False) as file:
            file.write(memoryview(piece.numpy()))  # pyright: ignore[reportArgumentType]

    def finish(self) -> torch.Tensor:
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _seals(self._gpu))
        return map_segment(self.descriptor, self._size, self._gpu)


class GpuSegment:
    """A segment of a GPU's memory, with the methods of ``HostSegment``."""

    def __init__(self, size: int, gpu: CudaDevice) -> None:
        self._gpu = gpu
        self.descriptor, self._memory = gpu.allocate_share(size)
        self._end = 0

    def append(self, piece: torch.Tensor) -> None:
        """Append a piece, and wait until it is copied.

        The caller may then free the piece, and other processes do not see this process's streams.
        """
        start, self._end = self._end, self._end + piece.nbytes
        self._gpu.copy(self._gpu.current_stream(), self._memory[start : self._end], piece)
        self._gpu.synchronize()

    def finish(self) -> torch.Tensor:
        return self._memory


def map_segment(descriptor: int, size: int, gpu: CudaDevice | None = None) -> torch.Tensor:
    """Map a segment of host memory with ``size`` bytes (uint8), and pin it if there is a GPU.

    The map stays valid when the descriptor is closed.

    Raises: ValueError if the segment has another size, or a process could still change it.
    """
    if (actual_size := os.fstat(descriptor).st_size) != size:
        raise ValueError(
            f"the segment has {actual_size} bytes instead of {size}; start all replicas with "
            "the same model and version of flashmoa-sglang"
        )
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals(gpu) != _seals(gpu):
        raise ValueError(
            "the segment is not sealed, so that it could still change; start all replicas "
            "with the same version of flashmoa-sglang"
        )
    # Torch requires writable memory, so it is mapped copy-on-write, although nothing is written.
    # With a GPU it is not, because CUDA would pin a copy of each page.
    access = mmap.ACCESS_COPY if gpu is None else mmap.ACCESS_WRITE
    memory = torch.frombuffer(mmap.mmap(descriptor, size, access=access), dtype=torch.uint8)
    if gpu is not None:
        gpu.pin(memory)
    return memory


def _seals(gpu: CudaDevice | None) -> int:
    size = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    return size | (fcntl.F_SEAL_WRITE if gpu is None else 0)


@dataclass(frozen=True, slots=True)
class Section:
    """The part of a replica's share in one segment.

    Attributes:
        on_device: whether the segment is on the replica's device, or in host memory.
        parts: the bytes of each layer's packed experts.
    """

    on_device: bool
    parts: Sequence[slice]

    @property
    def sizes(self) -> list[int]:
        return [part.stop - part.start for part in self.parts]


def divide(layers: Sequence[int], replica: Replica, on_device: float) -> list[Section]:
    """Return the sections of a replica's share, without empty ones.

    Args: layers: bytes of each layer's packed experts.
    """
    ranks, rank = replica.size, replica.rank
    shares = [(_align(size * rank // ranks), _align(size * (rank + 1) // ranks)) for size in layers]
    middles = [start + _align(int((end - start) * on_device)) for start, end in shares]
    starts, ends = zip(*shares, strict=True)
    sections = [
        Section(True, list(map(slice, starts, middles))),
        Section(False, list(map(slice, middles, ends))),
    ]
    return [section for section in sections if sum(section.sizes)]


def _align(size: int) -> int:
    return size // ALIGNMENT * ALIGNMENT


class Sharing:
    """Stores a replica's share of the layers' experts, and maps the others' shares."""

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
        """Let the layers copy from the memories of all shares, which are ordered by rank."""
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
    exchange: ShareExchange,
    on_device: float,
    wait: float = 3600.0,
) -> list[PackedExperts]:
    """Store and offer a replica's share of the layers' experts, and get the others' shares.

    Args: wait: seconds to wait for the other replicas. An hour lets them start one after the other.
    Raises: ReplicaError if a share cannot be stored, obtained or mapped.
    """
    packed = pack(layers, gpu, pinned=False)
    replica, place = exchange.replica, CPU if gpu is None else gpu.place
    sharing = Sharing(packed, gpu, replica, on_device)
    exchange.introduce(_digest(packed, on_gpu=gpu is not None), place, on_device)
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


def _digest(layers: Sequence[PackedExperts], *, on_gpu: bool) -> str:
    """Return a digest of all experts, their layout and the kind of device."""
    digest = hashlib.blake2b(b"GPU" if on_gpu else b"CPU", digest_size=16)
    for layer in layers:
        (packed,) = layer.runs
        digest.update(repr(layer.packing).encode())
        digest.update(memoryview(packed.memory.numpy()))  # pyright: ignore[reportArgumentType]
    return digest.hexdigest()
