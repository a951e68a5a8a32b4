"""Replicas of one model on one machine, and how each gets the others' shares of the experts.

Every replica listens on a Unix socket in Linux's abstract namespace (unix(7)), which is not a file
and disappears with the process. A peer that connects introduces itself and gets a file descriptor
of the share. After that the two processes do not depend on each other. A replica that has ended can
be started again, and then asks for the shares again.
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

ONLY_CPUS = "d2d is for CPUs; on GPUs SGLang has --dwdp-size, from 0.5.18 on"
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
class Introduction:
    """Message with which replicas introduce themselves.

    ``experts`` is a digest of all experts as they were loaded.
    """

    rank: int
    size: int
    experts: str

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
        self._share: int | None = None
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

    def offer(self, share: int, experts: str) -> None:
        """Give this replica's share to every replica that asks from now on.

        Args:
            share: file descriptor of the share; :meth:`close` closes it.
            experts: digest of all experts.
        """
        self._share = share
        self._own = Introduction(self._replica.rank, self._replica.size, experts)
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, args=(self._own, share), daemon=True)
        self._thread.start()

    def obtain(self, rank: int, deadline: float) -> int:
        """Wait for the share of a replica, which may be this one.

        Args: deadline: when to stop waiting, in :func:`time.monotonic`'s seconds.
        Returns: a file descriptor, for the caller to close.
        Raises: ReplicaError at the deadline, or if one of the replicas refuses another;
            RuntimeError if this replica has not offered its own share before.
        """
        if self._own is None:
            raise RuntimeError("a replica offers its own share first")
        warned = False
        while True:
            try:
                return self._ask(self._own, rank)
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
        """Stop offering the share."""
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
                if error.errno != errno.EINVAL:  # EINVAL means that the socket was closed.
                    text = "%s can no longer give its share to other replicas: %s"
                    logger.error(text, self._replica, error)
                return
            with peer:
                try:
                    self._answer(peer, own, share)
                except (OSError, ReplicaError) as error:
                    text = "%s could not give its share to another replica: %s"
                    logger.warning(text, self._replica, error)

    def _answer(self, peer: socket.socket, own: Introduction, share: int) -> None:
        peer.settimeout(_ANSWER_SECONDS)
        _check_user(peer)
        message = peer.recv(_MESSAGE_BYTES)
        if not message:  # The peer has disconnected.
            return
        problem = own.problem(Introduction.parse(message))
        # The peer is answered first, because the problem ends this process if it is still starting.
        socket.send_fds(peer, [own.encode()], [] if problem else [share])
        if problem:
            logger.error("%s has refused another replica: %s", self._replica, problem)
            self._problem = problem
            self._refused.set()

    def _ask(self, own: Introduction, rank: int) -> int:
        group, size = self._replica.group, self._replica.size
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(_ANSWER_SECONDS)
            peer.connect(Replica(group, rank, size).address)
            _check_user(peer)
            peer.send(own.encode())
            message, shares, _, _ = socket.recv_fds(
                peer, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        if not message:
            raise ConnectionResetError(f"replica {rank} ended")
        if problem := own.problem(Introduction.parse(message)):
            raise ReplicaError(problem)
        return shares[0]


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
