"""Experts divided among replicas: their shares, how replicas find each other and refuse others."""

import mmap
import os
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pytest
import torch
from flashmoa_sglang.moe.asyncep import replicas
from flashmoa_sglang.moe.asyncep.offloader import ExpertOffloader
from flashmoa_sglang.moe.asyncep.replicas import CPU, Replica, ReplicaError, Share, ShareExchange
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugin.moe.fakes import ExpertLayer, FakeGpu

WAIT = 20.0
NOTHING = Share(CPU, [])


@pytest.fixture
def group() -> str:
    """A group name that no other test's replicas have."""
    return uuid.uuid4().hex


def start(
    stack: ExitStack, replica: Replica, seed: int = 0, on_device: float = 1.0, gpu: Any = None
) -> None:
    """Start a replica of a model; return when the others have started."""
    exchange = stack.enter_context(closing(ShareExchange(replica)))
    store = partial(replicas.share_experts, exchange=exchange, on_device=on_device, wait=WAIT)
    offloader = ExpertOffloader(ExpertLayer, "compute", 2, store, open_gpu=lambda _device: gpu)
    offloader.wrap_modules(ExpertLayer(5, [seed, number, 0]) for number in range(4))
    offloader.post_init()


@given(
    layers=st.lists(st.integers(1, 40).map(lambda count: 256 * count), min_size=1, max_size=4),
    size=st.integers(1, 9),
    on_device=st.floats(0, 1),
)
def test_every_byte_is_stored_once(layers: list[int], size: int, on_device: float) -> None:
    stored: list[set[int]] = [set() for _ in layers]
    for rank in range(size):
        for section in replicas.divide(layers, Replica("group", rank, size), on_device):
            assert sum(section.sizes) > 0
            assert on_device > 0 if section.on_device else on_device < 1
            for blocks, part in zip(stored, section.parts, strict=True):
                assert part.start % 256 == part.stop % 256 == 0
                new = set(range(part.start // 256, part.stop // 256))
                assert not blocks & new
                blocks |= new
    assert [256 * len(blocks) for blocks in stored] == layers


def check_failures(first: Callable[[], object], second: Callable[[], object], says: str) -> None:
    """Start two replicas, which must both fail."""
    with ThreadPoolExecutor(2) as pool:
        for started in [pool.submit(first), pool.submit(second)]:
            with pytest.raises(ReplicaError, match=says):
                started.result()


def join(stack: ExitStack, group: str, rank: int, share: Share | None = None) -> ShareExchange:
    """Start the exchange of a replica, which may offer a share."""
    exchange = stack.enter_context(closing(ShareExchange(Replica(group, rank, 2))))
    exchange.introduce("digest", CPU, 1.0)
    if share is not None:
        exchange.offer(share)
    return exchange


@pytest.mark.parametrize(
    ("size", "more", "problem"),
    [
        (2, {"seed": 1}, "have not loaded the same experts"),
        (3, {}, "--flashmoa-asyncep-replica must give one number"),
        (2, {"on_device": 0.25}, "--flashmoa-asyncep-on-device must be the same"),
        (2, {"gpu": FakeGpu()}, "all on GPUs of this machine"),
    ],
    ids=["other model", "other size of the group", "other part in host memory", "GPU and CPU"],
)
def test_replicas_that_differ_refuse_each_other(
    group: str, size: int, more: dict[str, Any], problem: str
) -> None:
    with ExitStack() as stack:
        first = partial(start, stack, Replica(group, 0, 2))
        second = partial(start, stack, Replica(group, 1, size), **more)
        check_failures(first, second, problem)


def test_a_rank_that_runs_already_is_refused(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOA_ASYNCEP", "d2d")
    replica, message = Replica(group, 0, 2), r"^--flashmoa-asyncep d2d: .* runs already.*-group\.$"
    with closing(ShareExchange(replica)), pytest.raises(ReplicaError, match=message):
        ShareExchange(replica)
    ShareExchange(replica).close()


def test_waiting_for_a_replica_ends(group: str) -> None:
    with ExitStack() as stack:
        exchange = join(stack, group, 0, NOTHING)
        with pytest.raises(ReplicaError, match="waited too long for replica 1"):
            exchange.obtain(1, time.monotonic())


@pytest.mark.parametrize("failure", [TimeoutError, BlockingIOError, ConnectionResetError])
def test_a_silent_replica_is_asked_again(
    group: str, monkeypatch: pytest.MonkeyPatch, failure: type[OSError]
) -> None:
    ask, left = ShareExchange._ask, 2

    def ask_in_vain(exchange: ShareExchange, peer: int, rank: int) -> Share | None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise failure
        return ask(exchange, peer, rank)

    with ExitStack() as stays:
        peer = join(stays, group, 1, NOTHING)
        with ExitStack() as ends:
            join(ends, group, 0, NOTHING)
            peer.obtain(0, time.monotonic() + WAIT)
        again = join(stays, group, 0)
        monkeypatch.setattr(ShareExchange, "_ask", ask_in_vain)
        assert again.find(time.monotonic() + WAIT) == NOTHING
        left = 1
        with pytest.raises(ReplicaError, match="End it if it hangs"):
            again.find(time.monotonic())


def test_foreign_answers_are_refused(group: str) -> None:
    with ExitStack() as stack:
        exchange = join(stack, group, 0, NOTHING)
        stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        stranger.bind(Replica(group, 1, 2).address)
        stranger.listen()
        asking = stack.enter_context(ThreadPoolExecutor(1)).submit(
            exchange.obtain, 1, time.monotonic() + WAIT
        )
        with stranger.accept()[0] as asked:
            asked.recv(4096)
            asked.send(b"who are you?")
            with pytest.raises(ReplicaError, match="no replica of this version"):
                asking.result()


def test_a_share_of_another_size_is_refused(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    map_share = replicas.Sharing.map

    def map_less(self: replicas.Sharing, rank: int, share: Share) -> list[torch.Tensor]:
        os.ftruncate(descriptor := os.memfd_create("test"), 1)
        with open(descriptor):
            return map_share(self, rank, Share(CPU, [descriptor]))

    monkeypatch.setattr(replicas.Sharing, "map", map_less)
    with ExitStack() as stack:
        started = (partial(start, stack, Replica(group, rank, 2)) for rank in range(2))
        check_failures(*started, says=r"share of replica \d cannot .* has 1 bytes")


def test_a_sealed_segment_stays_as_it_is() -> None:
    segment = replicas.HostSegment(5)
    segment.append(torch.arange(3, dtype=torch.uint8))
    segment.append(torch.full((2,), 9, dtype=torch.uint8))
    memory = segment.finish()
    for change in (
        lambda: os.pwrite(segment.descriptor, b"other", 0),
        lambda: os.ftruncate(segment.descriptor, 1),
        lambda: mmap.mmap(segment.descriptor, 5, access=mmap.ACCESS_WRITE),
    ):
        with pytest.raises(PermissionError):
            change()
    with pytest.raises(ValueError, match="5 bytes instead of 6"):
        replicas.map_segment(segment.descriptor, 6)
    os.close(segment.descriptor)
    assert memory.tolist() == [0, 1, 2, 9, 9]


def test_a_segment_that_is_not_sealed_is_refused() -> None:
    segment = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(segment, b"share")
    with pytest.raises(ValueError, match="not sealed"):
        replicas.map_segment(segment, 5)
    os.close(segment)
