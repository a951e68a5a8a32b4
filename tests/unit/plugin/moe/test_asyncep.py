"""Experts in host memory: their packing, the rotation of slots, and that layers get their own."""

import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
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
from tests.unit.plugin.moe.fakes import ExpertLayer

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


def check_packing(tensors: dict[str, torch.Tensor]) -> None:
    packing = Packing.of(tensors)
    memory = torch.zeros(packing.bytes + 64, dtype=torch.uint8)
    packing.fill(memory, tensors)
    views = packing.views(memory.clone())
    for name, tensor in tensors.items():
        assert torch.equal(views[name], tensor)
        assert views[name].dtype == tensor.dtype
        # Kernels are chosen for the first strides of the tensors.
        assert views[name].stride() == tensor.stride()


@given(named_tensors())
def test_packed_tensors_stay_the_same(tensors: dict[str, torch.Tensor]) -> None:
    check_packing(tensors)


def test_padded_scales_stay_padded() -> None:
    # DeepGEMM packs UE8M0 scales column by column, with each column padded to 16 bytes.
    scales = torch.arange(EXPERTS * 2 * 8, dtype=torch.int32)
    padded = scales.as_strided((EXPERTS, 6, 2), (16, 1, 8))
    check_packing({"scales": padded, "next": torch.ones(EXPERTS)})


def test_a_tensor_with_shared_elements_is_refused() -> None:
    for shared in (torch.zeros(1, 6).expand(4, 6), torch.zeros(9).as_strided((3, 3), (2, 1))):
        with pytest.raises(ValueError, match="w13 has elements twice"):
            Packing.of({"w13": shared})


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
    """A layer whose number determines its values once it is loaded."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(EXPERTS)
        self.not_by_expert = torch.ones(7)
        self.number = number

    def load_number(self) -> None:
        self.load([10 * self.number + value for value in range(3)])


def blocks(count: int) -> Iterator[Any]:
    return (torch.nn.Sequential(torch.nn.Identity(), Layer(number)) for number in range(count))


def offload(
    layers: Iterable[Any], slots: int = 2, kind: type = Layer
) -> tuple[ExpertOffloader, list[Any]]:
    """Wrap and load layers. Return their offloader, and the layers."""
    offloader = ExpertOffloader(kind, "compute", slots, store_on_host)
    wrapped: list[Any] = offloader.wrap_modules(iter(layers))
    for layer in wrapped:
        layer.load_number()
    return offloader, wrapped


@pytest.mark.parametrize("slots", [1, 2, 3, 9])
def test_every_layer_computes_with_its_own_experts(slots: int) -> None:
    offloader = ExpertOffloader(Layer, "compute", slots, store_on_host)
    layers: list[Any] = [block[1] for block in offloader.wrap_modules(blocks(5))]
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
    in_slots = memory["on_host"] // 4 * memory["slots"]
    assert layer_bytes * memory["slots"] <= memory["in_slots"] == in_slots
    assert (memory["misses"] > 0) == (memory["slots"] < 4)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_forward_is_timed_if_that_was_asked_for(slots: int) -> None:
    offloader, layers = offload(map(Layer, range(4)), slots)
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


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


class OneScale(Layer):
    """A layer with a quantisation that makes one scale for all experts after loading."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.input_scale = parameter(torch.empty(EXPERTS))

    def load_number(self) -> None:
        super().load_number()
        self.input_scale = parameter(torch.tensor(0.5))


def test_shared_tensors_return_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    offloader, _ = offload(map(OneScale, range(3)), kind=OneScale)
    for taken in offloader._experts:
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
        self.w2_weight = parameter(torch.zeros(EXPERTS, 32, 32))


# Each quantisation: the attributes that it sets, whether it keeps the weight, and the outcome.
QUANTISATIONS: dict[str, tuple[Callable[[torch.Tensor], dict[str, Any]], bool, bool]] = {
    "in place": (lambda weight: {"w2_weight": parameter(weight.to(torch.int8))}, True, False),
    "repacked": (lambda weight: {"w2_packed": parameter(weight[:, :16].byte())}, False, False),
    "elsewhere": (lambda weight: {"method": SimpleNamespace(weight=weight)}, False, True),
    "expanded": (lambda _: {"w2_scale": torch.ones(1, 7).expand(EXPERTS, 7)}, True, True),
}


@pytest.mark.parametrize(("made", "keeps", "refused"), QUANTISATIONS.values(), ids=QUANTISATIONS)
def test_unpackable_quantisations_are_refused(made: Any, keeps: bool, refused: bool) -> None:
    offloader, layers = offload(map(Heavy, range(3)), kind=Heavy)
    for layer in layers:
        attributes = made(layer.w2_weight.data)
        if not keeps:
            del layer.w2_weight
        for name, value in attributes.items():
            setattr(layer, name, value)
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
    offloader.wrap_modules(blocks(2))
    with pytest.raises(SystemExit, match=r"hands experts of Sequential to no offloader"):
        torch.nn.Sequential().add_module("experts", Layer())
    # The guard has stopped, so that a process which continues is not disturbed.
    torch.nn.Sequential().add_module("experts", Layer())


def test_later_layers_are_not_checked(offloader: ExpertOffloader) -> None:
    offloader.wrap_modules(blocks(2))
    offloader.post_init()
    torch.nn.Sequential().add_module("experts", Layer())


@pytest.mark.parametrize("module", ["inkling_common.moe", "beam"])
def test_models_that_compute_themselves_are_refused(
    offloader: ExpertOffloader, module: str
) -> None:
    moe_class = type("OwnMoE", (torch.nn.Sequential,), {})
    moe_class.__module__ = f"sglang.srt.models.{module}"
    with pytest.raises(SystemExit, match="OwnMoE computes with the tensors of 0 itself"):
        offloader.wrap_modules(moe_class(Layer(number)) for number in range(2))


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


@pytest.mark.slow
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
