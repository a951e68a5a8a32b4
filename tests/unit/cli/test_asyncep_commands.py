"""Commands for a GPU in the documentation start, by SGLang's arithmetic, and have enough memory.

None of them is run on a GPU.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from flashmoa_sglang.asyncep.memory_plan import COMMUNICATION, ModelSizes, make_plan
from flashmoa_sglang.releases import installed

ROOT = Path(__file__).parents[3]
# MiB of memory that nvidia-smi shows and SGLang divides.
GPUS = {"H100": 81559, "H200": 143771}
# Bytes in use at the start: twice what the driver, CUDA's context and libraries usually take.
TAKEN = 2 << 30
# Factor for the allocator's fragments, workspaces and logits.
MARGIN = 1.5
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
QWEN3_30B = json.loads((ROOT / "examples/models/qwen3-30b-a3b/config.json").read_text())
QWEN3_235B = QWEN3_30B | {
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
}
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
OLMOE: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
COPIED = {
    "Qwen/Qwen3-30B-A3B": QWEN3_30B,
    "Qwen/Qwen3-235B-A22B": QWEN3_235B,
    "mistralai/Mixtral-8x7B-v0.1": MIXTRAL,
    "allenai/OLMoE-1B-7B-0924": OLMOE,
}
MODELS = COPIED | {
    "Qwen/Qwen3-8B": QWEN3_8B,
    "examples/models/qwen3-30b-a3b": QWEN3_30B,
}
# Placeholders for a model's name, and a model for CPUs.
NO_MODEL = {"MODEL", "M", "$(ls", ".cache/models/SmolLM2-135M-Instruct"}
OLD = "--disable-cuda-graph --chunked-prefill-size 131072 --max-prefill-tokens 131072"


@dataclass(frozen=True)
class Command:
    """A documented command.

    Attributes:
        block: the code block that has it. All servers of a block share one GPU.
        arguments: arguments of ``flashmoa serve``.
        gpus: the GPUs that the block's comments name, or all.
    """

    block: str
    model: str
    arguments: tuple[str, ...]
    gpus: tuple[str, ...] = tuple(GPUS)


def commands(path: Path) -> Iterable[Command]:
    text = path.read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`(flashmoa serve --model-path [^`]+)`", text)
    for number, code in enumerate([*fenced, *inline]):
        yield from commands_of(code, f"{path.relative_to(ROOT)}, block {number}")


def commands_of(code: str, block: str) -> Iterable[Command]:
    variables = dict(re.findall(r'^(\w+)="(.*?)"', code, re.DOTALL | re.MULTILINE))
    for name, value in variables.items():
        code = code.replace(f"${name}", " ".join(value.split()))
    gpus = tuple(gpu for gpu in GPUS if re.search(rf"^#.*\b{gpu}\b", code, re.MULTILINE))
    for line in code.replace("\\\n", " ").splitlines():
        if line.startswith("flashmoa serve --model-path "):
            _, _, _, model, *rest = shlex.split(line, comments=True)
            # Engines in the time of a GPU run on a CPU.
            if model not in NO_MODEL and "--flashmoa-device" not in rest:
                arguments = tuple(argument for argument in rest if argument != "&")
                yield Command(block, model, arguments, gpus or tuple(GPUS))


DOCUMENTED = [
    command
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for command in commands(path)
]
CASES = [
    (block, gpu)
    for block in dict.fromkeys(command.block for command in DOCUMENTED)
    for gpu in next(command.gpus for command in DOCUMENTED if command.block == block)
]


class GpuMemory:
    """Computes budgets by :mod:`gpu_memory`, in a separate process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        program = Path(__file__).with_name("gpu_memory.py")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def budget(
        self, command: Command, gpu: str, taken: int = TAKEN, sees: bool = True
    ) -> dict[str, Any]:
        model = self._folder / command.model.replace("/", "-")
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(MODELS[command.model]))
        request = {"argv": command.arguments, "model": str(model), "total": GPUS[gpu]}
        assert self._process.stdin and self._process.stdout
        request |= {"taken": taken, "sees": sees}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def stop(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def gpu_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterable[GpuMemory]:
    if installed() != "0.5.18":
        pytest.skip("the formulas are called by the names that they have in SGLang 0.5.18")
    process = GpuMemory(tmp_path_factory.mktemp("models"))
    yield process
    process.stop()


def activations(model: dict[str, Any], tokens: int) -> int:
    """Return how many bytes a forward needs at its peak for the tensors that SGLang makes."""
    return ModelSizes.read(model).peak_bytes(tokens)


@pytest.mark.parametrize(("block", "gpu"), CASES)
def test_the_servers_of_a_documented_block_fit_on_the_gpu(
    gpu_memory: GpuMemory, block: str, gpu: str
) -> None:
    used, forwards, free = TAKEN, 0.0, 0
    for command in DOCUMENTED:
        if command.block != block:
            continue
        # Servers start one after the other, and SGLang divides the memory that is free then.
        budget = gpu_memory.budget(command, gpu, used)
        assert budget["problem"] is None
        assert 0 < budget["fraction"] < 1
        # The pool has room for the largest forward and a few more prompts of the usual length.
        assert budget["tokens"] >= 1.05 * budget["forward"] > 0
        used += budget["weights"] + budget["kv"]
        forwards += MARGIN * activations(MODELS[command.model], budget["forward"])
        free = budget["left"]
    assert forwards <= free


def test_the_documentation_has_commands_for_a_gpu() -> None:
    files = {command.block.partition(",")[0] for command in DOCUMENTED}
    assert {"README.md", "docs/asyncep.md", "docs/scoring.md"} <= files
    asyncep = [command for command in DOCUMENTED if "h2d" in command.arguments]
    assert {gpu for command in asyncep for gpu in command.gpus} == set(GPUS)


@pytest.mark.parametrize(("gpu", "fraction"), [("H100", -1.418), ("H200", -0.372)])
def test_sglangs_own_choice_for_long_forwards_leaves_nothing(
    gpu_memory: GpuMemory, gpu: str, fraction: float
) -> None:
    model = "Qwen/Qwen3-30B-A3B"
    resident = Command("before", model, tuple(OLD.split()))
    budget = gpu_memory.budget(resident, gpu)
    assert budget["fraction"] == fraction
    assert "no GPU memory for the KV cache" in budget["problem"]
    # With h2d the plugin refuses this before the weights are loaded, where it cannot choose.
    copied = replace(resident, arguments=(*resident.arguments, "--flashmoa-asyncep", "h2d"))
    refused = gpu_memory.budget(copied, gpu, sees=False)
    assert "give --mem-fraction-static" in refused["problem"]
    assert gpu_memory.budget(copied, gpu)["problem"] is None


def test_the_figures_of_the_documentation_are_computed(gpu_memory: GpuMemory) -> None:
    lower = ("--flashmoa-asyncep", "h2d", "--mem-fraction-static", "0.75")
    h2d = Command("", "Qwen/Qwen3-30B-A3B", lower)
    resident = gpu_memory.budget(Command("", h2d.model, ()), "H200")
    h100, h200 = (gpu_memory.budget(h2d, gpu) for gpu in GPUS)
    text = " ".join((ROOT / "docs" / "asyncep.md").read_text().split())
    assert f"of {resident['weights'] / 1e9:.0f} GB" in text
    assert f"{h100['weights'] / 1e9:.1f} GB" in text
    assert f"a pool of {h100['tokens'] // 1000},000 tokens (H100)" in text
    assert h200["tokens"] == pytest.approx(1e6, rel=0.1)
    assert f"{h100['left'] >> 30} and {h200['left'] >> 30} GiB" in text
    assert h100["forward"] == 131072
    assert f"needs {activations(MODELS[h2d.model], 131072) / 2**30:.1f} GiB" in text


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", COPIED)
def test_sglang_divides_the_memory_as_the_plugin_has_reckoned(
    gpu_memory: GpuMemory, model: str, gpu: str
) -> None:
    plan = make_plan(ModelSizes.read(COPIED[model]), GPUS[gpu] << 20)
    budget = gpu_memory.budget(Command("", model, ("--flashmoa-asyncep", "h2d")), gpu)
    assert budget["problem"] is None
    assert (budget["fraction"], budget["forward"]) == (plan.fraction, plan.forward)
    assert budget["weights"] == pytest.approx(plan.weights, rel=1e-4)
    assert budget["tokens"] == pytest.approx(plan.pool, rel=1e-3)
    assert budget["left"] == pytest.approx(plan.left, rel=1e-3)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("more", "ranks", "share"),
    [
        ("--tp 2", 2, 0.0),
        ("--tp 4", 4, 0.0),
        ("--flashmoa-asyncep d2d --flashmoa-asyncep-replica 1/8", 1, 1 / 8),
        ("--flashmoa-asyncep hybrid --flashmoa-asyncep-replica 0/4", 1, 1 / 8),
    ],
)
def test_sglang_divides_the_memory_of_each_gpu_as_the_plugin_has_reckoned(
    gpu_memory: GpuMemory, gpu: str, more: str, ranks: int, share: float
) -> None:
    model = "Qwen/Qwen3-30B-A3B"
    free = (GPUS[gpu] << 20) - (COMMUNICATION if ranks > 1 else 0)
    plan = make_plan(ModelSizes.read(COPIED[model]).of_rank(ranks), free, share=share)
    arguments = ("--flashmoa-asyncep", "h2d", *shlex.split(more))
    budget = gpu_memory.budget(Command("", model, arguments), gpu)
    assert budget["problem"] is None
    assert (budget["fraction"], budget["forward"]) == (plan.fraction, plan.forward)
    assert budget["weights"] == pytest.approx(plan.weights, rel=1e-4)
    # What is set aside for communication is divided, too, by SGLang.
    spare = round(COMMUNICATION * plan.fraction) if ranks > 1 else 0
    kv = ModelSizes.read(COPIED[model]).of_rank(ranks).kv_bytes_per_token
    assert budget["tokens"] == pytest.approx(plan.pool + spare // kv, rel=1e-3)


@pytest.mark.parametrize("graphs", ["--disable-cuda-graph", "--cuda-graph-backend-decode=disabled"])
def test_graphs_are_off_whichever_way_the_user_says_it(gpu_memory: GpuMemory, graphs: str) -> None:
    arguments = ("--flashmoa-asyncep", "h2d", graphs)
    assert (
        gpu_memory.budget(Command("", "Qwen/Qwen3-30B-A3B", arguments), "H100")["problem"] is None
    )


def test_graphs_that_the_user_wants_are_refused_and_not_turned_off(gpu_memory: GpuMemory) -> None:
    arguments = ("--flashmoa-asyncep", "h2d", "--cuda-graph-backend-decode", "full")
    budget = gpu_memory.budget(Command("", "Qwen/Qwen3-30B-A3B", arguments), "H100")
    assert "a graph would look for experts" in budget["problem"]
