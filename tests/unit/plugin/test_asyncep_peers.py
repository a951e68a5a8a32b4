"""The order of copies from peers and from the host on fake GPUs, and what replicas share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flashmoa_sglang.asyncep.offloader import StreamCopier
from flashmoa_sglang.asyncep.replicas import GpuSegment, ReplicaError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.plugin.asyncep_rigs import HAZARDS, LAYER_BYTES, Group
from tests.unit.plugin.fake_gpu import FakeGpu


@settings(max_examples=40)
@given(
    size=st.integers(1, 3),
    slots=st.integers(1, 3),
    on_device=st.sampled_from([0.2, 0.5, 1.0]),
    timed=st.booleans(),
    choices=st.lists(st.integers(0, 2), max_size=60),
)
def test_layers_read_experts_of_peers_and_of_the_host_in_whatever_order_streams_run(
    size: int, slots: int, on_device: float, timed: bool, choices: list[int]
) -> None:
    group = Group(size, 4, slots, on_device)
    for rig in group.rigs:
        for _ in range(2):
            rig.forward(timed=timed)
        rig.gpu.run(choices)
        assert len(rig.read) == 16 and rig.all_read_their_own()
        memory = rig.offloader.memory()
        stored = memory["on_host"] + memory["share"] + memory["at_peers"]
        assert stored == 3 * LAYER_BYTES and (memory["on_host"] > 0) == (on_device < 1)
        assert sum(pinned.nbytes for pinned in rig.gpu.pinned) == memory["on_host"]
        # Experts of peers are copied while those of the host are.
        assert len(rig.gpu.streams) == (2 if on_device == 1 else 3)
    group.stop()


def test_a_restarted_replica_gets_back_the_share_that_the_others_still_use() -> None:
    group = Group(2, 4, 2, on_device=0.5)
    rig, ended = group.rigs
    group.exchanges[1].close()
    again = group.start(1)
    for replica in (rig, again):
        replica.forward()
        replica.gpu.run()
        assert replica.all_read_their_own()
    # Both map the same memory: nothing has been allocated a second time.
    for old, new in zip(ended.offloader._sources, again.offloader._sources, strict=True):
        for kept, mapped in zip(old.runs, new.runs, strict=True):
            assert kept.where == mapped.where
            kept.memory[0] ^= 0xFF
            assert torch.equal(kept.memory, mapped.memory)
            kept.memory[0] ^= 0xFF
    group.stop()


def test_a_piece_may_be_freed_as_soon_as_it_is_in_the_segment() -> None:
    gpu: Any = FakeGpu()
    segment = GpuSegment(8, gpu)
    for start in (0, 4):
        segment.append(piece := torch.arange(start, start + 4, dtype=torch.uint8))
        piece.fill_(99)
    assert segment.finish().tolist() == list(range(8))
    os.close(segment.descriptor)


def test_gpus_that_do_not_reach_each_other_are_refused() -> None:
    with pytest.raises(ReplicaError, match=r"share of replica \d cannot be used: GPU-\d cannot"):
        Group(2, 3, 2, reaches=[])


def _for_one_way(way: str, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Take a step of the copies out for one way alone."""

    def take_out(patch: pytest.MonkeyPatch) -> None:
        step = getattr(StreamCopier, name)

        def without(self: StreamCopier, slot: int, channel: str, *args: Any) -> None:
            if channel != way:
                step(self, slot, channel, *args)

        patch.setattr(StreamCopier, name, without)

    return take_out


def _waits_for_one_way(way: str) -> Callable[[pytest.MonkeyPatch], None]:
    def wait(self: StreamCopier, slot: int) -> None:
        self._gpu.current_stream().wait_event(self._filled_events[slot][way])

    return lambda patch: patch.setattr(StreamCopier, "wait", wait)


def _offers_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeGpu, "synchronize", lambda _self: None)


# Streams that run first: of the layers, of the copies between devices, of those from the host.
ORDERS = [[0], [1], [2], [1, 1, 1, 1, 0], [2, 2, 2, 2, 0]]


@pytest.mark.parametrize(
    "break_it",
    [
        *HAZARDS,
        pytest.param(_waits_for_one_way("nvlink"), id="the wait for what comes from the host"),
        pytest.param(_waits_for_one_way("pcie"), id="the wait for what comes from peers"),
        pytest.param(_for_one_way("pcie", "_wait_until_free"), id="the host's wait for the slot"),
        pytest.param(_for_one_way("nvlink", "_wait_until_free"), id="the peers' wait for the slot"),
        pytest.param(_offers_at_once, id="the wait before a share is offered"),
    ],
)
def test_each_wait_is_needed_with_experts_of_peers_and_of_the_host(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_right() -> bool:
        found = True
        for choices in ORDERS:
            group = Group(2, 5, 2, on_device=0.5)
            for rig in group.rigs:
                for _ in range(2):
                    rig.forward()
                rig.gpu.run(choices)
                found &= rig.all_read_their_own()
            group.stop()
        return found

    assert is_right()
    break_it(monkeypatch)
    assert not is_right()
