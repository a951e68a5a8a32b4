"""What ``--flashmoa-asyncep`` chooses on a GPU, by arithmetic. No GPU has run it yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashmoa_sglang.asyncep import memory_plan
from flashmoa_sglang.asyncep.memory_plan import Needs, divide_memory
from flashmoa_sglang.releases import RELEASE
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import ROOT

# MiB of memory that nvidia-smi shows.
GPUS = {"H100": 81559, "H200": 143771}
SMALL_GPUS = {"A100": 40960, "L40S": 46068}
FOLDER = ROOT / "examples/models/qwen3-30b-a3b"
QWEN3_30B: dict[str, Any] = json.loads((FOLDER / "config.json").read_text())
QWEN3_235B = QWEN3_30B | {
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
}
FP8 = {"quantization_config": {"quant_method": "fp8"}}
MODELS = {
    "Qwen3-30B-A3B": QWEN3_30B,
    "Qwen3-30B-A3B-FP8": QWEN3_30B | FP8,
    "Qwen3-235B-A22B": QWEN3_235B,
    "Qwen3-235B-A22B-FP8": QWEN3_235B | FP8,
}
NO_GRAPHS = {
    name.strip().partition(" ")[0].replace("-", "_"): name.strip().partition(" ")[2] or True
    for name in RELEASE.NO_GRAPHS.split("--")[1:]
}
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(NO_GRAPHS),
    **dict.fromkeys(
        ("device", "revision", "quantization", "chunked_prefill_size", "mem_fraction_static")
    ),
    **dict.fromkeys(("tp_size", "pp_size", "dp_size", "nnodes", "gpu_id_step"), 1),
    "model_path": str(FOLDER),
    "dtype": "auto",
    "base_gpu_id": 0,
    "max_prefill_tokens": 16_384,
    "moe_a2a_backend": "none",
}


@pytest.fixture(autouse=True)
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs 0 to 3 are H100s; on the others another process runs."""
    monkeypatch.setenv("FLASHMOA_ASYNCEP", "h2d")
    monkeypatch.setattr(memory_plan, "lacks_accelerator", lambda: False)
    total = SimpleNamespace(total_memory=GPUS["H100"] << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _gpu: total)
    used = [0, 0, 0, 0, 50 << 30, 79 << 30]
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda gpu: used[gpu])


def choose(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that SGLang gets other than the user has given them."""
    named = Namespace(**DEFAULTS | arguments)
    chosen: Namespace = memory_plan.choose_arguments(lambda _cls, args: args, object, named)
    before = DEFAULTS | arguments
    return {name: value for name, value in vars(chosen).items() if value != before.get(name)}


def divided(forward: int, fraction: float) -> dict[str, Any]:
    lengths = {"chunked_prefill_size": forward, "max_prefill_tokens": forward}
    return NO_GRAPHS | lengths | {"mem_fraction_static": fraction}


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        ({}, divided(131_072, 0.77)),
        ({"base_gpu_id": 1, "tp_size": 2, "dtype": "bfloat16"}, divided(131_072, 0.77)),
        ({"base_gpu_id": 3, "dp_size": 2}, divided(32_768, 0.78)),
        ({"base_gpu_id": 4}, divided(32_768, 0.78)),
        ({"base_gpu_id": 4, "nnodes": 2, "tp_size": 2}, divided(65_536, 0.64)),
        ({"chunked_prefill_size": 4096, "mem_fraction_static": 0.5}, NO_GRAPHS),
        ({"chunked_prefill_size": 131_072}, NO_GRAPHS),
        ({"mem_fraction_static": 0.9}, NO_GRAPHS),
        ({"device": "cpu"}, {}),
    ],
)
def test_what_the_user_does_not_give_is_chosen(
    arguments: dict[str, Any], chosen: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert choose(**arguments) == chosen
    assert ("chose --chunked" in caplog.text) == (len(chosen) > len(NO_GRAPHS))


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        ({"tensor_parallel_size": 2}, divided(65_536, 0.64)),
        ({"data_parallel_size": 2, "pipeline_parallel_size": 2}, NO_GRAPHS),
        ({"attention_context_parallel_size": 2}, NO_GRAPHS),
        ({"moe_data_parallel_size": 2}, NO_GRAPHS),
    ],
)
def test_sizes_count_by_their_names_in_sglang_0_5_12(
    sizes: dict[str, int], chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = "tensor", "pipeline", "data", "attention_context", "moe_data"
    for name in ("tp_size", "pp_size", "dp_size"):
        monkeypatch.delitem(DEFAULTS, name)
    named = dict.fromkeys((f"{kind}_parallel_size" for kind in kinds), 1)
    # Of GPUs 3 to 6, the first has the most free memory, and the last none that is known.
    assert choose(**named | sizes, base_gpu_id=3) == chosen


def test_what_the_user_gives_beside_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, *_ = NO_GRAPHS
    chosen = choose(max_prefill_tokens=20_000, **{graphs: "full"})
    assert "max_prefill_tokens" not in chosen and graphs not in chosen
    # What shares a forward is at most so long, so a longer chunk would only take memory.
    assert (chosen["chunked_prefill_size"], chosen["mem_fraction_static"]) == (16_384, 0.94)
    assert choose(max_prefill_tokens=4096)["chunked_prefill_size"] == 4096
    monkeypatch.setenv("FLASHMOA_ASYNCEP", "off")
    assert choose() == {}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"attn_cp_size": 2}, "memory is not reckoned for --attn-cp-size 2"),
        ({"enable_dp_attention": True}, "memory is not reckoned for --enable-dp-attention"),
        ({"moe_a2a_backend": "deepep"}, "memory is not reckoned for --moe-a2a-backend deepep"),
        ({"dtype": "float32"}, "memory is not reckoned for --dtype float32"),
        ({"model_path": "/dev/null/model"}, "/dev/null/model has no config.json"),
        ({"base_gpu_id": 5}, "forwards do not fit into the 0.6 GiB that are free"),
        ({"base_gpu_id": 6}, "the free memory of the GPUs is not known (list index out of"),
    ],
)
def test_where_nothing_can_be_chosen_the_log_names_the_arguments_to_give(
    arguments: dict[str, Any], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose(**arguments) == NO_GRAPHS
    assert f"because {problem}" in caplog.text
    names = "--chunked-prefill-size, --max-prefill-tokens and --mem-fraction-static"
    assert f"Give {names} yourself" in caplog.text


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (QWEN3_30B | {"model_type": "deepseek_v3"}, "'deepseek_v3' is not known (known: mixtral,"),
        ({"model_type": "mixtral"}, "config.json has no 'hidden_size'"),
        (QWEN3_30B | {"mlp_only_layers": [0]}, "some layers have no experts"),
        (QWEN3_30B | {"quantization_config": {"quant_method": "awq"}}, "quantization 'awq'"),
    ],
)
def test_models_whose_memory_is_not_known_are_refused(config: Any, problem: str) -> None:
    with pytest.raises(ValueError) as refused:
        Needs.of(config)
    assert problem in str(refused.value)


@given(free=st.integers(8 << 30, 300 << 30), model=st.sampled_from(list(MODELS)))
def test_what_is_chosen_fits_and_forwards_grow_with_the_memory(free: int, model: str) -> None:
    needs = Needs.of(MODELS[model])
    try:
        forward, fraction = divide_memory(needs, free)
    except ValueError as error:
        assert "do not fit" in str(error)
        return
    usable = free - (2 << 30)
    assert 1.5 * forward * needs.peak + (2 << 30) <= usable * (1 - fraction)
    assert needs.weights + 2 * forward * needs.kv <= usable * fraction < usable
    assert divide_memory(needs, 2 * free)[0] >= forward


@pytest.mark.parametrize(
    ("mode", "replica", "gpu", "model", "chosen"),
    [
        ("h2d", "", "A100", "Qwen3-235B-A22B", (8_192, 0.89)),
        ("h2d", "", "L40S", "Qwen3-235B-A22B", (16_384, 0.86)),
        ("hybrid", "0/2", "H100", "Qwen3-235B-A22B-FP8", (8_192, 0.94)),
        ("hybrid", "0/8", "H100", "Qwen3-235B-A22B", (32_768, 0.87)),
        ("d2d", "0/2", "H100", "Qwen3-235B-A22B-FP8", "beside weights of 120.1 GiB"),
    ],
)
def test_weights_with_the_share_and_kv_of_two_forwards_have_room(
    mode: str, replica: str, gpu: str, model: str, chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHMOA_ASYNCEP", mode)
    monkeypatch.setenv("FLASHMOA_ASYNCEP_REPLICA", replica)
    needs, free = Needs.of(MODELS[model]), (GPUS | SMALL_GPUS)[gpu] << 20
    if isinstance(chosen, str):
        with pytest.raises(ValueError, match=chosen):
            divide_memory(needs, free)
    else:
        assert divide_memory(needs, free) == chosen


def test_tensor_and_pipeline_parallelism_divide_what_a_gpu_holds() -> None:
    whole = Needs.of(QWEN3_235B)
    tensor, both = Needs.of(QWEN3_235B, tp=4), Needs.of(QWEN3_235B, tp=4, pp=2)
    assert (tensor.weights, tensor.kv) == (whole.weights // 4, whole.kv // 4)
    assert both.weights < tensor.weights and both.kv == tensor.kv // 2
    assert Needs.of(QWEN3_235B, tp=8).kv == tensor.kv, "each GPU has one KV head at least"
    assert Needs.of(QWEN3_235B, "fp8") == Needs.of(QWEN3_235B | FP8)


def test_the_table_of_the_documentation_is_computed() -> None:
    rows: list[str] = []
    for gpu, mib in GPUS.items():
        for model, config in MODELS.items():
            needs = Needs.of(config)
            forward, fraction = divide_memory(needs, mib << 20)
            weights, peak = f"{needs.weights / 1e9:.1f} GB", forward * needs.peak / 2**30
            pool = int((((mib << 20) - (2 << 30)) * fraction - needs.weights) / needs.kv)
            rows.append(
                f"| {gpu} | {model} | {weights} | {forward:,} | {peak:.1f} GiB | {fraction} "
                f"| {pool // 1000:,},000 tokens |"
            )
    documented = (ROOT / "docs" / "asyncep.md").read_text().splitlines()
    assert [line for line in documented if line.startswith(("| H100", "| H200"))] == rows


PROGRAM = """
import sys
from types import SimpleNamespace
from flashmoa_sglang.cpu import torchvision_ops
torchvision_ops.allow_mismatched_build()
import torch
from flashmoa_sglang.asyncep import memory_plan
from sglang.srt import server_args
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

free = 81559 << 20
memory_plan.lacks_accelerator = lambda: False
memory_plan._free_memory = lambda given: free // (given.base_gpu_id + given.gpu_id_step)
server_args.get_device_memory_capacity = lambda _device: 81559.0
name = "sglang.srt.server_args.ServerArgs.from_cli_args"
HookRegistry.register(name, memory_plan.choose_arguments, HookType.AROUND)
HookRegistry.apply_hooks()
given = memory_plan.RELEASE.resolve_arguments(server_args.prepare_server_args(sys.argv[1:]))
print(memory_plan.RELEASE.graphs_are_off(given), given.chunked_prefill_size,
      given.max_prefill_tokens, given.mem_fraction_static)
"""


def test_sglang_takes_what_is_chosen(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(f"model-path: {FOLDER}\ncuda-graph-max-bs: 8\n")
    arguments = f"--config {file} --device cuda --skip-tokenizer-init".split()
    environment = {"SGLANG_PLUGINS": "none", "FLASHMOA_ASYNCEP": "h2d"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip().endswith("True 131072 131072 0.77"), done.stderr
