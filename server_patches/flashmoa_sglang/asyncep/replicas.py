"""Replicas of one model on one machine, and how each gets the others' shares of the experts.

Every replica listens on a Unix socket in Linux's abstract namespace (unix(7)), which is not a file
and disappears with the process. A peer that connects introduces itself and gets file descriptors of
a share. After that the two processes do not depend on each other. A replica that has ended can be
started again, and then asks for the shares again: first for its own, which the others still use.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

logger = logging.getLogger(__name__)

# The place of shares that are on no GPU.
CPU = "cpu"
# A share has a segment on a device, and one in host memory.
_SEGMENTS = 2
_MESSAGE_BYTES = 4096
_ANSWER_SECONDS = 5.0
_RETRY_SECONDS = 0.1


class ReplicaError(RuntimeError):
    """Raised if a replica cannot join its group; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Replica:
    """Replica number ``rank`` (from 0) of the ``size`` replicas in the group named ``group``."""

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
    """The segments of a replica's share, by their file descriptors.

    ``place``: the UUID of the GPU that has the segment on a device, or ``CPU``.
    """

    place: str
    descriptors: Sequence[int]


@dataclass(frozen=True, slots=True)
class Introduction:
    """Message with which replicas introduce themselves.

    Attributes:
        experts: digest of all experts as they were loaded.
        on_device: which part of each share is on a device.
        share: the rank whose share is asked for, or comes with this message.
        place: where that share is; in a question, the replica's own device.
    """

    rank: int
    size: int
    experts: str
    on_device: float
    share: int
    place: str

    @classmethod
    def parse(cls, message: bytes) -> Introduction:
        """Parse another replica's message.

        Raises: ReplicaError if it is not an introduction of this version.
        """
        try:
            return cls(**json.loads(message))
        except (TypeError, ValueError) as error:
            raise ReplicaError(
                f"what answers is no replica of this version: {message[:80]!r}; run one version "
                "of flashmoa-sglang in all replicas, or choose another --flashmoa-asyncep-group"
            ) from error

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def problem(self, other: Introduction) -> str | None:
        """Return why this replica and another one do not belong together; ``None`` if they do."""
        if other.size != self.size:
            return (
                f"replica {other.rank} was started for {other.size} replicas and replica "
                f"{self.rank} for {self.size}: --flashmoa-asyncep-replica must give one number "
                "after the / in all of them"
            )
        if other.experts != self.experts:
            return (
                f"replicas {other.rank} and {self.rank} have not loaded the same experts: start "
                "all of a group with the same model, dtype and quantization"
            )
        if other.on_device != self.on_device:
            return (
                f"replica {other.rank} was started for {other.on_device:g} of the experts on "
                f"devices and replica {self.rank} for {self.on_device:g}: --flashmoa-asyncep and "
                "--flashmoa-asyncep-on-device must be the same in all of them"
            )
        if (other.place == CPU) != (self.place == CPU):
            return (
                f"replicas {other.rank} and {self.rank} run on a GPU and on a CPU: start all of a "
                "group on GPUs of this machine"
            )
        return None


class ShareExchange:
    """Offers a replica's share to the others of its group, and gets theirs.

    Raises: ReplicaError if another process has the replica's place in the group.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._problem: str | None = None
        self._refused = threading.Event()
        self._thread: threading.Thread | None = None
        self._own: Introduction | None = None
        # By rank, what this replica has stored or got, to give it to others.
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
        """Say what this replica has loaded, as in ``Introduction``, before the other calls."""
        rank, size = self._replica.rank, self._replica.size
        self._own = Introduction(rank, size, experts, on_device, rank, place)

    def find(self, deadline: float) -> Share | None:
        """Return this replica's share if another one has it, from the time before a restart.

        Args: deadline: as of :meth:`obtain`, for replicas that run but do not answer.
        Raises: ReplicaError at the deadline, or if one of the replicas refuses the other.
        """
        peers = (peer for peer in range(self._replica.size) if peer != self._replica.rank)
        return next(filter(None, (self._find_at(peer, deadline) for peer in peers)), None)

    def offer(self, share: Share) -> None:
        """Give this replica's share to every replica that asks from now on.

        From now on, :meth:`close` closes the share's descriptors.
        """
        self._shares[self._replica.rank] = share
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def obtain(self, rank: int, deadline: float) -> Share:
        """Wait for the share of another replica; :meth:`close` closes its descriptors.

        Args: deadline: when to stop waiting, in :func:`time.monotonic`'s seconds.
        Raises: ReplicaError at the deadline, or if one of the replicas refuses another.
        """
        warned = False
        while True:
            try:
                if (share := self._ask(rank, rank)) is not None:
                    self._shares[rank] = share
                    return share
            except (ConnectionError, TimeoutError, BlockingIOError):
                pass  # That replica does not listen yet, or has ended.
            if not warned:
                text = "%s waits for replica %d; start it now if it is not running"
                logger.warning(text, self._replica, rank)
                warned = True
            if self._refused.wait(_RETRY_SECONDS):
                raise ReplicaError(self._problem)
            if time.monotonic() > deadline:
                raise ReplicaError(
                    f"{self._replica} has waited too long for replica {rank}: is replica {rank} "
                    "running on this machine? A larger --flashmoa-asyncep-wait gives it more time"
                )

    def close(self) -> None:
        """Stop giving shares to others."""
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
                    logger.error(text, self._replica, error)
                return
            with peer:
                try:
                    self._answer(peer)
                except (OSError, ReplicaError) as error:
                    text = "%s could not give its share to another replica: %s"
                    logger.warning(text, self._replica, error)

    def _answer(self, peer: socket.socket) -> None:
        peer.settimeout(_ANSWER_SECONDS)
        _check_user(peer)
        message = peer.recv(_MESSAGE_BYTES)
        if not message:  # The peer has disconnected.
            return
        own, question = self._introduction(), Introduction.parse(message)
        problem, share = own.problem(question), self._shares.get(question.share)
        if problem or share is None:
            answer, descriptors = own, []
        else:
            answer = replace(own, share=question.share, place=share.place)
            descriptors = share.descriptors
        # The peer is answered first, because the problem ends this process if it is still starting.
        socket.send_fds(peer, [answer.encode()], descriptors)
        if problem:
            logger.error("%s has refused another replica: %s", self._replica, problem)
            self._problem = problem
            self._refused.set()

    def _ask(self, peer: int, rank: int) -> Share | None:
        """Ask a replica for the share of a rank; return ``None`` if it does not have it."""
        own = self._introduction()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.connect(replace(self._replica, rank=peer).address)
            _check_user(connection)
            connection.send(replace(own, share=rank).encode())
            message, descriptors, _, _ = socket.recv_fds(
                connection, _MESSAGE_BYTES, _SEGMENTS, socket.MSG_CMSG_CLOEXEC
            )
        if not message:
            raise ConnectionResetError(f"replica {peer} ended")
        answer = Introduction.parse(message)
        if problem := own.problem(answer):
            raise ReplicaError(problem)
        return Share(answer.place, descriptors) if answer.share == rank else None

    def _find_at(self, peer: int, deadline: float) -> Share | None:
        while True:
            try:
                return self._ask(peer, self._replica.rank)
            except ConnectionRefusedError:  # That replica does not listen yet, or has ended.
                return None
            except (ConnectionError, TimeoutError, BlockingIOError) as error:
                if time.monotonic() > deadline:
                    raise ReplicaError(
                        f"{self._replica} does not learn whether replica {peer} has its share, "
                        f"because that does not answer: end replica {peer} if it hangs"
                    ) from error
            time.sleep(_RETRY_SECONDS)

    def _introduction(self) -> Introduction:
        if self._own is None:
            raise RuntimeError("a replica says first what it has loaded")
        return self._own


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
