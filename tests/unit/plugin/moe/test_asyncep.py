"""Experts in host memory: their packing, the rotation of slots, and that layers get their own."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from flashmoa_sglang.moe import asyncep
from flashmoa_sglang.moe.asyncep import experts
from flashmoa_sglang.moe.asyncep.experts import Experts, Packing, store_on_host
from flashmoa_sglang.moe.asyncep.offloader import ExpertOffloader, SlotRotation
from flashmoa_sglang.sglang.releases import RELEASE
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import ROOT
from tests.unit.plugin.moe.fake_gpu import ExpertLayer

EXPERTS = 4


@st.composite
def named_tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for number in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
        order = draw(st.permutations(range(len(shape))))
        numbers = torch.arange(torch.Size(shape).numel()) % 100
        tensors[f"t{number}"] = numbers.reshape(shape).to(dtype).permute(order)
    return tensors


@given(named_tensors())
def test_packed_tensors_stay_the_same(tensors: dict[str, torch.Tensor]) -> None:
    packing = Packing.of(tensors)
    memory = torch.zeros(packing.bytes + 64, dtype=torch.uint8)
    packing.fill(memory, tensors)
    views = packing.views(memory.clone())
    for name, tensor in tensors.items():
        assert torch.equal(views[name], tensor)
        assert views[name].dtype == tensor.dtype
        # Kernels are chosen for the strides that the tensors had at first.
        assert views[name].stride() == tensor.stride()


def test_padded_scales_stay_padded() -> None:
    # DeepGEMM packs UE8M0 scales column by column, with each column padded to 16 bytes.
    scales = torch.arange(EXPERTS * 2 * 8, dtype=torch.int32)
    padded = scales.as_strided((EXPERTS, 6, 2), (16, 1, 8))
    packing = Packing.of({"scales": padded, "next": torch.ones(EXPERTS)})
    memory = torch.zeros(packing.bytes, dtype=torch.uint8)
    packing.fill(memory, {"scales": padded, "next": torch.ones(EXPERTS)})
    views = packing.views(memory)
    assert torch.equal(views["scales"], padded) and views["scales"].stride() == (16, 1, 8)
    assert torch.equal(views["next"], torch.ones(EXPERTS))


def test_a_tensor_with_shared_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="w13 has elements twice"):
        Packing.of({"w13": torch.zeros(1, 6).expand(4, 6)})
    with pytest.raises(ValueError, match="w13 has elements twice"):
        Packing.of({"w13": torch.zeros(9).as_strided((3, 3), (2, 1))})


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3))
def test_consecutive_forwards_never_miss_a_layer(layers: int, slots: int, forwards: int) -> None:
    rotation = SlotRotation(layers, slots)
    fetched = 0
    for layer in list(range(layers)) * forwards:
        assert rotation.slot_of(layer) is not None
        fetched += rotation.advance(layer) is not None
    assert rotation.misses == 0
    assert fetched == (0 if slots >= layers else forwards * layers)


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_layers_may_be_asked_for_in_any_order(layers: int, slots: int, data: st.DataObject) -> None:
    rotation = SlotRotation(layers, slots)
    content = list(rotation.slots)
    for layer in data.draw(st.lists(st.integers(0, layers - 1), max_size=20)):
        slot = rotation.slot_of(layer)
        if slot is None:
            slot = rotation.evict_for(layer)
            content[slot] = layer
        assert content[slot] == layer
        if slot_and_layer := rotation.advance(layer):
            content[slot_and_layer[0]] = slot_and_layer[1]
        assert content == rotation.slots
        assert len(set(content)) == len(content) == min(layers, slots)


class Layer(ExpertLayer):
    """A layer with a number, on which its values depend once it is loaded."""

    def __init__(self, number: int) -> None:
        super().__init__(EXPERTS)
        self.not_by_expert = torch.ones(7)
        self.number = number

    def load_number(self) -> None:
        self.load([10 * self.number + value for value in range(3)])


@pytest.mark.parametrize("slots", [1, 2, 3, 9])
def test_every_layer_computes_with_its_own_experts(slots: int) -> None:
    offloader = ExpertOffloader(Layer, "compute", slots, store_on_host)
    blocks = (torch.nn.Sequential(torch.nn.Identity(), Layer(number)) for number in range(5))
    layers: list[Any] = [block[1] for block in offloader.wrap_modules(blocks)]
    for layer in layers:
        layer.load_number()
    offloader.post_init()
    for number in [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 3, 1, 4, 4, 2]:
        expected = [2 * (10 * number + value) for value in range(3)]
        assert layers[number].compute(2) == expected
    layer_bytes = sum(tensor.nbytes for tensor in offloader._experts[0].tensors().values())
    memory = offloader.memory()
    assert memory["layers"] == 5 and memory["slots"] == min(slots, 4)
    assert memory["resident"] == layer_bytes
    assert (
        layer_bytes * memory["slots"]
        <= memory["in_slots"]
        == memory["on_host"] // 4 * memory["slots"]
    )
    assert (memory["misses"] > 0) == (memory["slots"] < 4)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_forward_is_timed_if_that_was_asked_for(slots: int) -> None:
    offloader = ExpertOffloader(Layer, "compute", slots, store_on_host)
    layers: list[Any] = offloader.wrap_modules(Layer(number) for number in range(4))
    for layer in layers:
        layer.load_number()
    offloader.post_init()
    for asked in (True, False):
        if asked:
            offloader.time_next(tokens=17)
        for layer in layers:
            layer.compute(1)
        times = offloader.take_times()
        assert (times is not None) == asked
        if times is not None:
            assert times.tokens == 17
            assert times.window > 0 and times.transfer > 0


class OneScale(Layer):
    """A layer with a quantisation that makes one scale for all experts after loading."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.input_scale = torch.nn.Parameter(torch.empty(EXPERTS), requires_grad=False)

    def load_number(self) -> None:
        super().load_number()
        self.input_scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)


def test_shared_tensors_return_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    offloader = ExpertOffloader(OneScale, "compute", 2, store_on_host)
    layers: list[Any] = offloader.wrap_modules(OneScale(number) for number in range(3))
    for layer, taken in zip(layers, offloader._experts, strict=True):
        layer.load_number()
        # No machine lacks this device, although nothing can be computed there.
        taken.device = torch.device("meta")
    bound: dict[str, str] = {}

    def bind(_experts: Experts, tensors: dict[str, torch.Tensor]) -> None:
        bound.update({name: tensor.device.type for name, tensor in tensors.items()})

    monkeypatch.setattr(Experts, "bind", bind)
    offloader.post_init()
    expected = {"w13_weight": "cpu", "w13_scale": "cpu", "bias": "cpu", "input_scale": "meta"}
    assert bound == expected


class Heavy(Layer):
    """A layer whose weights are most of its bytes."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.w2_weight = torch.nn.Parameter(torch.zeros(EXPERTS, 32, 32), requires_grad=False)


def quantise(layer: Any) -> None:
    layer.w2_weight = torch.nn.Parameter(layer.w2_weight.to(torch.int8), requires_grad=False)


def repack(layer: Any) -> None:
    four_bits = torch.zeros(EXPERTS, 16, 32, dtype=torch.uint8)
    layer.w2_packed = torch.nn.Parameter(four_bits, requires_grad=False)
    del layer.w2_weight


def move_elsewhere(layer: Any) -> None:
    layer.quant_method = SimpleNamespace(w2_weight=layer.w2_weight.data)
    del layer.w2_weight


def add_expanded_scale(layer: Any) -> None:
    layer.w2_scale = torch.ones(1, 7).expand(EXPERTS, 7)


@pytest.mark.parametrize(
    ("process", "refused"),
    [(quantise, False), (repack, False), (move_elsewhere, True), (add_expanded_scale, True)],
)
def test_unpackable_quantisations_are_refused(
    process: Callable[[Any], None], refused: bool
) -> None:
    offloader = ExpertOffloader(Heavy, "compute", 2, store_on_host)
    for layer in offloader.wrap_modules(Heavy(number) for number in range(3)):
        process(layer)
    if refused:
        with pytest.raises(SystemExit, match="does not go with this model: its quantisation"):
            offloader.post_init()
    else:
        offloader.post_init()
        assert offloader.memory()["on_host"] > 0


@pytest.fixture
def offloader() -> Iterator[ExpertOffloader]:
    offloader = ExpertOffloader(Layer, "compute", 2, store_on_host)
    yield offloader
    offloader.stop_watching()


@pytest.mark.parametrize("count", [0, 1])
def test_a_model_whose_experts_all_stay_is_refused(offloader: ExpertOffloader, count: int) -> None:
    factories = [lambda: torch.nn.Linear(2, 2), lambda: torch.nn.Sequential(Layer(0))]
    modules = offloader.wrap_modules(make() for make in factories[: count + 1])
    assert len(modules) == count + 1
    with pytest.raises(SystemExit, match=f"it has {count} layers of experts"):
        offloader.post_init()


def test_a_stage_of_a_pipeline_may_have_no_experts() -> None:
    offloader = ExpertOffloader(Layer, "compute", 2, store_on_host, whole=False)
    offloader.wrap_modules(iter([torch.nn.Linear(2, 2)]))
    offloader.post_init()
    assert offloader.memory()["layers"] == 0


def test_experts_outside_of_layers_are_refused(offloader: ExpertOffloader) -> None:
    offloader.wrap_modules(torch.nn.Sequential(Layer(number)) for number in range(2))
    with pytest.raises(SystemExit, match=r"hands experts of Sequential to no offloader"):
        torch.nn.Sequential().add_module("experts", Layer(2))
    # The guard has stopped, so that a process which continues is not disturbed.
    torch.nn.Sequential().add_module("experts", Layer(2))


@pytest.mark.parametrize("module", ["inkling_common.moe", "beam"])
def test_models_that_compute_themselves_are_refused(
    offloader: ExpertOffloader, module: str
) -> None:
    moe_class = type("OwnMoE", (torch.nn.Sequential,), {})
    moe_class.__module__ = f"sglang.srt.models.{module}"
    with pytest.raises(SystemExit, match="OwnMoE computes with the tensors of 0 itself"):
        offloader.wrap_modules(moe_class(Layer(number)) for number in range(2))


def test_later_layers_are_not_checked(offloader: ExpertOffloader) -> None:
    offloader.wrap_modules(torch.nn.Sequential(Layer(number)) for number in range(2))
    offloader.post_init()
    torch.nn.Sequential().add_module("experts", Layer(2))


def write_group(root: Path, path: str, limit: str, used: int, cached: int) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    tenth = cached // 10
    (folder / "memory.stat").write_text(
        f"anon 5\ninactive_file {6 * tenth}\nactive_file {3 * tenth}\nslab_reclaimable {tenth}\n"
    )


@pytest.mark.parametrize(
    ("own", "limit_of_parent", "available"),
    [("/", "max", 600), ("/", "500", 300), ("/a/b", "max", 70), ("/a/b", "100", 50)],
)
def test_a_containers_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, limit_of_parent: str, available: int
) -> None:
    class Machine:
        available = 600

    monkeypatch.setattr(psutil, "virtual_memory", Machine)
    assert experts.available_bytes(tmp_path) == 600
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"0::{own}\n")
    if own == "/":
        write_group(tmp_path, "", limit_of_parent, 300, 100)
    else:
        write_group(tmp_path, "a", limit_of_parent, 60, 10)
        write_group(tmp_path, "a/b", "90", 30, 10)
    assert experts.available_bytes(tmp_path) == available


def test_experts_without_room_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = torch.nn.Linear(64, 64)
    # They are there twice while they are packed.
    needed = 2 * 4 * (64 * 64 + 64)
    monkeypatch.setattr(experts, "available_bytes", lambda: needed)
    Experts(layer).move_to_host()
    monkeypatch.setattr(experts, "available_bytes", lambda: needed - 1)
    with pytest.raises(SystemExit, match="the next layer's experts need"):
        Experts(layer).move_to_host()


def chosen(monkeypatch: pytest.MonkeyPatch, mode: str, **given: Any) -> dict[str, Any]:
    """Return the arguments that SGLang gets on a GPU other than the user has given them."""
    monkeypatch.setenv("FLASHMOA_ASYNCEP", mode)
    monkeypatch.setattr(asyncep, "lacks_accelerator", lambda: False)
    flags = [part.strip().partition(" ")[0] for part in RELEASE.NO_GRAPHS.split("--")[1:]]
    before = {"device": None, "chunked_prefill_size": None}
    before |= dict.fromkeys(flag.replace("-", "_") for flag in flags) | given
    found = asyncep.choose_arguments(lambda _cls, args: args, object, Namespace(**before))
    return {name: value for name, value in vars(found).items() if value != before[name]}


def test_graphs_are_off_and_short_forwards_warn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = list(chosen(monkeypatch, "h2d"))
    assert len(graphs) == 2 and "Give --chunked-prefill-size" in caplog.text
    caplog.clear()
    assert list(chosen(monkeypatch, "h2d", chunked_prefill_size=65536)) == graphs
    assert list(chosen(monkeypatch, "h2d", **{graphs[0]: "full"})) == graphs[1:]
    assert chosen(monkeypatch, "h2d", device="cpu") == chosen(monkeypatch, "off") == {}
    assert caplog.text.count("Give --chunked") == 1


PROGRAM = """
import sys
import flashmoa_sglang.serve  # This prepares the import of SGLang.
from flashmoa_sglang.moe import asyncep
from sglang.srt import server_args
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

asyncep.lacks_accelerator = lambda: False
server_args.get_device_memory_capacity = lambda _device: 81559.0
name = "sglang.srt.server_args.ServerArgs.from_cli_args"
HookRegistry.register(name, asyncep.choose_arguments, HookType.AROUND)
HookRegistry.apply_hooks()
given = server_args.prepare_server_args(sys.argv[1:])
# SGLang 0.5.23 makes its own choices later.
getattr(given, "resolve_once", bool)()
print(asyncep.RELEASE.graphs_are_off(asyncep.RELEASE.resolve_arguments(given)))
"""


def test_sglang_has_no_graphs_then() -> None:
    model = ROOT / "examples/models/qwen3-30b-a3b"
    arguments = f"--model-path {model} --device cuda --skip-tokenizer-init".split()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments],
        env=os.environ | {"SGLANG_PLUGINS": "none", "FLASHMOA_ASYNCEP": "h2d"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip().endswith("True"), done.stderr
