"""The order of copies on a GPU, with a fake one whose streams run in any order that CUDA allows."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashmoa_sglang.asyncep.offloader import StreamCopier
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugin.asyncep_rigs import HAZARDS, Rig
from tests.unit.plugin.fake_gpu import FakeGpu

# Which stream runs first: that of the layers, or that of the copies.
COPIES_LATE, COPIES_EARLY = [0], [1]


@given(
    layers=st.integers(2, 6),
    slots=st.integers(1, 4),
    forwards=st.integers(1, 3),
    timed=st.booleans(),
    choices=st.lists(st.integers(0, 1), max_size=60),
)
def test_layers_read_their_own_experts_in_whatever_order_streams_run(
    layers: int, slots: int, forwards: int, timed: bool, choices: list[int]
) -> None:
    rig = Rig(layers, slots)
    for _ in range(forwards):
        rig.forward(timed=timed)
    rig.gpu.run(choices)
    assert len(rig.read) == 2 * layers * forwards and rig.all_read_their_own()
    assert rig.offloader.memory()["misses"] == 0


@given(
    slots=st.integers(1, 3),
    orders=st.lists(st.lists(st.integers(0, 4), max_size=6), max_size=4),
    choices=st.lists(st.integers(0, 1), max_size=60),
)
def test_layers_out_of_order_read_their_own_experts(
    slots: int, orders: list[list[int]], choices: list[int]
) -> None:
    rig = Rig(5, slots)
    for order in orders:
        rig.forward(order)
    rig.gpu.run(choices)
    assert rig.all_read_their_own()


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("choices", [COPIES_LATE, COPIES_EARLY])
def test_a_layer_that_raises_still_protects_the_slot_that_it_reads(
    slots: int, choices: list[int]
) -> None:
    rig = Rig(5, slots, failing=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        rig.forward()
    rig.forward([4, 3, 1])
    rig.forward()
    rig.gpu.run(choices)
    assert rig.all_read_their_own()


def test_one_layer_computes_while_the_next_ones_experts_are_copied() -> None:
    """With two slots, the copy for the layer after the next waits for the layer before alone."""
    rig = Rig(4, 2)
    rig.gpu.run()
    rig.forward([0, 1, 2])
    computes, copies = rig.gpu.streams
    before = copies.done
    while len(rig.read) < 4:  # Layers 0 and 1 have been computed, layer 2 not yet.
        assert computes.step()
    while copies.step():
        pass
    assert copies.done - before == 3  # A wait, and the two pieces of layer 3.
    assert len(rig.read) == 4


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("break_it", HAZARDS)
def test_each_wait_is_needed(
    break_it: Callable[[pytest.MonkeyPatch], None],
    slots: int,
    timed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_right() -> bool:
        found = True
        for choices in (COPIES_LATE, COPIES_EARLY):
            rig = Rig(5, slots)
            for _ in range(2):
                rig.forward(timed=timed)
            rig.gpu.run(choices)
            found &= rig.all_read_their_own()
        return found

    assert is_right()
    break_it(monkeypatch)
    assert not is_right()


def test_pinned_memory_that_a_quantisation_left_is_freed_after_each_layer() -> None:
    rig = Rig(5, 2)
    assert rig.gpu.freed_host_caches == len(rig.gpu.pinned) > 1


def test_a_first_copy_waits_for_work_that_used_the_slots_memory_before() -> None:
    gpu: Any = FakeGpu()
    done: list[str] = []
    gpu.main.enqueue(lambda: done.append("weights repacked"))
    gpu.copy = lambda stream, *_: stream.enqueue(lambda: done.append("copied"))
    source: Any = SimpleNamespace(copies=lambda *_: [(None, None)])
    StreamCopier(gpu, 2, ["pcie"]).fetch(1, torch.empty(0), source, timed=False)
    gpu.run(COPIES_EARLY)
    assert done == ["weights repacked", "copied"]
