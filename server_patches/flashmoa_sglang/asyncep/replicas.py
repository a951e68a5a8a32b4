"""Replicas of one model on one machine, and how each gets the others' shares of its experts.

Every replica listens on a Unix socket in Linux's abstract namespace (unix(7)), which is no file
and ends with the process. A peer that connects says what it is and gets a descriptor of the share;
after that the two have nothing to do with each other any more. A replica that ended may come back,
and asks again.
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
from dataclasses import asdict, dataclass

logger = logging.getLogger(__name__)

ONLY_CPUS = "this is for CPUs; on GPUs SGLang has --dwdp-size, from 0.5.18 on"
_MESSAGE_BYTES = 4096
_ANSWER_SECONDS = 5.0
_RETRY_SECONDS = 0.1


class ReplicaError(RuntimeError):
    """The replicas of a group do not come together; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Replica:
    """Number ``rank`` (from 0) of the ``size`` replicas that are called ``group``."""

    group: str
    rank: int
    size: int

    @property
    def address(self) -> str:
        return f"\0flashmoa-asyncep/{os.getuid()}/{self.group}/{self.rank}"

    def __str__(self) -> str:
        return f"replica {self.rank} of {self.size} in group {self.group!r}"


@dataclass(frozen=True, slots=True)
class Introduction:
    """What replicas tell each other. ``experts``: a digest of all experts as they were loaded."""

    rank: int
    size: int
    experts: str

    @classmethod
    def parse(cls, message: bytes) -> Introduction:
        """Read what another replica sent. Raises: ReplicaError."""
        try:
            return cls(**json.loads(message))
        except (TypeError, ValueError) as error:
            raise ReplicaError(
                f"what answers is no replica of this version: {message[:80]!r}"
            ) from error

    def bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def problem(self, other: Introduction) -> str | None:
        """Say why this replica and another one do not belong together."""
        if other.size != self.size:
            return (
                f"replica {other.rank} was started for {other.size} replicas and replica "
                f"{self.rank} for {self.size}: --flashmoa-asyncep-replica must give one number"
            )
        if other.experts != self.experts:
            return (
                f"replicas {other.rank} and {self.rank} have not loaded the same experts: start "
                "all of a group with the same model, dtype and quantization"
            )
        return None


class Meeting:
    """Where one replica gives its share to the others of its group, and takes theirs.

    Raises: ReplicaError where the replica's place in the group is taken.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._problem: str | None = None
        self._refused = threading.Event()
        self._thread: threading.Thread | None = None
        self._own: Introduction | None = None
        self._share: int | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(replica.address)
        except OSError as error:
            self._socket.close()
            if error.errno != errno.EADDRINUSE:
                raise
            raise ReplicaError(
                f"{replica} runs already: give each a --flashmoa-asyncep-replica of its own, or "
                "another --flashmoa-asyncep-group"
            ) from error

    def give(self, share: int, experts: str) -> None:
        """Give this replica's share, from now on, to every replica that asks.

        Args:
            share: its file descriptor, which is the meeting's from now on.
            experts: a digest of all experts.
        """
        self._share = share
        self._own = Introduction(self._replica.rank, self._replica.size, experts)
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, args=(self._own, share), daemon=True)
        self._thread.start()

    def take(self, rank: int, deadline: float) -> int:
        """Wait for a replica's share, this replica's own included.

        Args: deadline: until when to wait for it, in :func:`time.monotonic`'s seconds.
        Returns: a file descriptor, for the caller to close.
        Raises: ReplicaError; RuntimeError before this replica gives its own.
        """
        if self._own is None:
            raise RuntimeError("a replica gives its own share first")
        told = False
        while True:
            try:
                return self._ask(self._own, rank)
            except (ConnectionError, TimeoutError, BlockingIOError):
                pass  # It is not there yet, or not any more.
            if not told:
                logger.warning("%s waits for replica %d", self._replica, rank)
                told = True
            if self._refused.wait(_RETRY_SECONDS):
                raise ReplicaError(self._problem)
            if time.monotonic() > deadline:
                raise ReplicaError(
                    f"{self._replica} has waited too long for replica {rank}: is it running, on "
                    "this machine? --flashmoa-asyncep-wait gives it more time"
                )

    def close(self) -> None:
        """Stop giving the share."""
        if self._thread is not None:
            self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join()
        self._socket.close()
        if self._share is not None:
            os.close(self._share)

    def _serve(self, own: Introduction, share: int) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError as error:
                if error.errno != errno.EINVAL:  # Which it is once it is closed.
                    logger.error("%s cannot give its share any more: %s", self._replica, error)
                return
            with peer:
                try:
                    self._give(peer, own, share)
                except (OSError, ReplicaError) as error:
                    logger.warning("%s could not answer another one: %s", self._replica, error)

    def _give(self, peer: socket.socket, own: Introduction, share: int) -> None:
        peer.settimeout(_ANSWER_SECONDS)
        _check_user(peer)
        message = peer.recv(_MESSAGE_BYTES)
        if not message:  # It did not wait.
            return
        problem = own.problem(Introduction.parse(message))
        # Answered first: where this replica is starting, the problem ends it.
        socket.send_fds(peer, [own.bytes()], [] if problem else [share])
        if problem:
            logger.error("%s has refused another one: %s", self._replica, problem)
            self._problem = problem
            self._refused.set()

    def _ask(self, own: Introduction, rank: int) -> int:
        group, size = self._replica.group, self._replica.size
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(_ANSWER_SECONDS)
            peer.connect(Replica(group, rank, size).address)
            _check_user(peer)
            peer.send(own.bytes())
            message, shares, _, _ = socket.recv_fds(
                peer, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        if not message:
            raise ConnectionResetError(f"replica {rank} ended")
        if problem := own.problem(Introduction.parse(message)):
            raise ReplicaError(problem)
        return shares[0]


def _check_user(peer: socket.socket) -> None:
    """Abstract sockets have no file permissions. Raises: ReplicaError."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if user != os.getuid():
        raise ReplicaError(f"the other replica belongs to user {user}, this one to {os.getuid()}")
