"""Test the modelled time of the plugin's real offloader, and that missing waits are noticed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flashmoa_bench.modelled_gpu.expert_parallelism import Division
from flashmoa_bench.modelled_gpu.gpu import Gpu, LayerSeconds, Model
from flashmoa_bench.modelled_gpu.virtual_gpu import Bandwidths, VirtualGpu
from flashmoa_bench.prefill.offloaded import OffloadedModel, offloaded
from flashmoa_sglang.moe.asyncep.experts import store_on_host
from flashmoa_sglang.moe.asyncep.offloader import StreamCopier
from flashmoa_sglang.moe.saturation import MARGIN, find_saturation
from hypothesis import example, given, settings
from hypothesis import strategies as st

# A layer's experts have 1.2e9 bytes: 24 ms from the host, and 3 ms from other GPUs.
GPU = Gpu(
    "toy", 80 << 30, 4e12, 1e15, 0.0, pcie=50.331648e9, nvlink=402.653184e9, copy_efficiency=1
)
HOST_SECONDS, PEER_SECONDS, OWN_SECONDS = 0.024, 0.003, 1.207959552e9 / 2e12
CONFIG = {
    "hidden_size": 2048, "num_attention_heads": 32, "intermediate_size": 6144, "vocab_size": 151936,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip
SHORT, LONG = LayerSeconds(0.001, 0.001), LayerSeconds(0.1, 0.1)
SECONDS = st.floats(0.0001, 0.1)
FORWARDS = 20
# At the first forward, some copies are ahead of the computation.
AHEAD = 4 * HOST_SECONDS / FORWARDS


def model_of(layers: int) -> Model:
    return Model("toy", CONFIG | {"num_hidden_layers": layers})


def simulated_seconds(layers: int, slots: int, experts: float, others: float) -> float:
    """Return the mean time of forwards whose copies follow each other, into one slot each."""
    if slots >= layers - 1:
        return 0.0
    now, copied, freed = 0.0, 0.0, [0.0] * slots
    for number in range(FORWARDS * (layers - 1)):
        now += (experts + others) * (number % (layers - 1) == 0) + others
        slot = number % slots
        copied = max(copied, freed[slot]) + HOST_SECONDS
        now = freed[slot] = max(now, copied) + experts
    return now / FORWARDS


@example(layers=9, slots=2, experts=0.0117, others=0.0098)
@given(layers=st.integers(3, 12), slots=st.integers(2, 4), experts=SECONDS, others=SECONDS)
def test_a_forward_takes_its_computation_or_its_copies(
    layers: int, slots: int, experts: float, others: float
) -> None:
    seconds = LayerSeconds(experts, others)
    with offloaded(Division.H2D, model_of(layers), GPU, 1, slots=slots) as replica:
        found = replica.seconds(*[seconds] * FORWARDS) / FORWARDS
    copies = (layers - 1) * HOST_SECONDS if slots < layers - 1 else 0.0
    expected = max(layers * (experts + others), copies)
    if slots == 2:  # A copy may have to wait for experts that are being computed.
        expected = max(expected, simulated_seconds(layers, slots, experts, others))
    assert found == pytest.approx(expected, abs=AHEAD)


@settings(max_examples=10)
@given(
    replicas=st.sampled_from([2, 4, 8]),
    on_device=st.sampled_from([0.25, 0.5, 1.0]),
    experts=SECONDS,
    others=SECONDS,
)
def test_the_slower_way_of_the_copies_counts(
    replicas: int, on_device: float, experts: float, others: float
) -> None:
    way = Division.D2D if on_device == 1 else Division.HYBRID
    with offloaded(way, model_of(6), GPU, replicas, on_device=on_device) as replica:
        found = replica.seconds(*[LayerSeconds(experts, others)] * FORWARDS) / FORWARDS
        whole = replica.offloader.memory()
    # A share's borders are multiples of 256 bytes, so the parts are not exactly these.
    stored = {name: whole[name] / (5 * 12_288) for name in ("on_host", "share", "at_peers")}
    assert stored["on_host"] == pytest.approx(1 - on_device, abs=0.13)
    assert stored["at_peers"] == pytest.approx(on_device * (1 - 1 / replicas), abs=0.13)
    nvlink = stored["share"] * OWN_SECONDS + stored["at_peers"] * PEER_SECONDS
    copy = max(stored["on_host"] * HOST_SECONDS, nvlink)
    assert found == pytest.approx(max(6 * (experts + others), 5 * copy), abs=AHEAD)


def test_one_slot_hides_copies_behind_other_computation_only() -> None:
    with offloaded(Division.H2D, model_of(6), GPU, 1, slots=1) as replica:
        found = replica.seconds(LayerSeconds(experts=0.05, others=0.01))
    # The copy for the second layer of experts begins before the next forward does.
    waits = 4 * (HOST_SECONDS - 0.01) + max(0.0, HOST_SECONDS - (0.06 + 0.01))
    assert found == pytest.approx(6 * 0.06 + waits)


def do_nothing(copier: Any, slot: int) -> None:
    pass


def wait_for_nvlink_only(copier: Any, slot: int) -> None:
    copier._gpu.current_stream().wait_event(copier._filled_events[slot]["nvlink"])


@pytest.mark.parametrize(
    ("method", "mutant"),
    [
        ("wait", do_nothing),
        ("wait", wait_for_nvlink_only),
        ("note_use", do_nothing),
    ],
)
@pytest.mark.parametrize("seconds", [SHORT, LONG])
def test_a_missing_wait_is_a_race_even_if_copies_are_hidden(
    monkeypatch: pytest.MonkeyPatch, method: str, mutant: Callable[..., None], seconds: LayerSeconds
) -> None:
    def run() -> OffloadedModel:
        with offloaded(Division.HYBRID, model_of(8), GPU, 2) as replica:
            for _ in range(3):
                replica.forward(seconds)
            return replica

    right = run()
    assert (right.gpu.races, right.stale) == (0, 0)
    monkeypatch.setattr(StreamCopier, method, mutant)
    wrong = run()
    assert wrong.gpu.races > 0
    # Bytes that have not landed are read only if the copies take longer than the computation.
    assert (wrong.stale > 0) == (method == "wait" and seconds is SHORT)


def test_the_gate_finds_the_tokens_that_hide_copies() -> None:
    """Each token computes for 2 us in each layer, so that 14,400 hide 24 ms with the margin."""
    with offloaded(Division.H2D, model_of(8), GPU, 1) as replica:
        sizes = (64, 256, 1024, 4096)
        each = [
            replica.time_layers(tokens, LayerSeconds(tokens * 1.5e-6, tokens * 0.5e-6))
            for tokens in sizes
        ]
        found = find_saturation(each, largest_forward=65_536)
        assert found is not None and found.tokens is not None
        assert found.tokens == pytest.approx(MARGIN * HOST_SECONDS / 2e-6, abs=2)
        assert found.transfer == pytest.approx(HOST_SECONDS)


def test_replicas_on_virtual_gpus_have_the_plugins_shares() -> None:
    with offloaded(Division.HYBRID, model_of(4), GPU, 4, on_device=0.5) as replica:
        memory = replica.offloader.memory()
    assert (memory["share"], memory["at_peers"], memory["on_host"]) == (4608, 13824, 18432)


def test_work_enqueued_before_a_synchronization_has_landed() -> None:
    gpu = VirtualGpu(Bandwidths(1e3, 1e4, 1e5))
    target, source = torch.zeros(1000, dtype=torch.uint8), torch.ones(1000, dtype=torch.uint8)
    gpu.copy(gpu.new_stream(), target, source)
    gpu.begin(LayerSeconds(experts=0.5))
    gpu.compute_experts([source])
    assert not target.any() and gpu.now == 0.5
    gpu.synchronize()
    assert target.all() and gpu.now == 1.0
    gpu.compute_experts([target])
    assert not gpu.races
    gpu.copy(gpu.new_stream(), target, source)
    assert gpu.races == 2  # The new stream waits neither for the first copy nor for the read.
    gpu.begin(LayerSeconds(), 0.1)
    assert gpu.now == 1.5


def test_a_data_sheet_without_ways_to_the_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="toy has no pcie or nvlink"):
        Bandwidths.of(dataclasses.replace(GPU, pcie=0))


def test_a_model_needs_a_second_layer_of_experts() -> None:
    with pytest.raises(SystemExit, match="1 layers of experts"):
        OffloadedModel(VirtualGpu(Bandwidths(1, 1, 1)), 1, 2, store_on_host)
