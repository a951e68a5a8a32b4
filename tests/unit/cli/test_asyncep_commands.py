"""Test the documentation's commands for a GPU: by SGLang's own arithmetic, they start and fit.

Nothing here has run on a GPU.
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
from flashmoa_sglang.releases import installed

ROOT = Path(__file__).parents[3]
# MiB of memory as nvidia-smi shows it, and as SGLang uses it.
GPUS = {"H100": 81559, "H200": 143771}
# The driver, CUDA's context and libraries take about half of this.
TAKEN = 2 << 30
# Reserve for fragments of torch's allocator, workspaces and logits.
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
MODELS = {
    "Qwen/Qwen3-8B": QWEN3_8B,
    "Qwen/Qwen3-30B-A3B": QWEN3_30B,
    "examples/models/qwen3-30b-a3b": QWEN3_30B,
}
# Placeholders, and models for CPUs, for which there is nothing to compute.
NO_MODEL = {"MODEL", "M", "$(ls"}
OLD = "--disable-cuda-graph --chunked-prefill-size 131072 --max-prefill-tokens 131072"


@dataclass(frozen=True)
class Command:
    """``arguments`` of ``flashmoa serve``. ``where``: the block that it stands in, whose servers
    share one GPU; ``gpus``: those that its comments name, or all."""

    where: str
    model: str
    arguments: tuple[str, ...]
    gpus: tuple[str, ...] = tuple(GPUS)


def commands(path: Path) -> Iterable[Command]:
    text = path.read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`(flashmoa serve --model-path [^`]+)`", text)
    for number, block in enumerate([*fenced, *inline]):
        yield from commands_of(block, f"{path.relative_to(ROOT)}, block {number}")


def commands_of(block: str, where: str) -> Iterable[Command]:
    variables = dict(re.findall(r'^(\w+)="(.*?)"', block, re.DOTALL | re.MULTILINE))
    for name, value in variables.items():
        block = block.replace(f"${name}", " ".join(value.split()))
    named = tuple(gpu for gpu in GPUS if re.search(rf"^#.*\b{gpu}\b", block, re.MULTILINE))
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith("flashmoa serve --model-path "):
            _, _, _, model, *rest = shlex.split(line, comments=True)
            if model not in NO_MODEL:
                arguments = tuple(one for one in rest if one != "&")
                yield Command(where, model, arguments, named or tuple(GPUS))


DOCUMENTED = [
    command
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for command in commands(path)
]
CASES = [
    (where, gpu)
    for where in dict.fromkeys(command.where for command in DOCUMENTED)
    for gpu in next(one.gpus for one in DOCUMENTED if one.where == where)
]


class Sglang:
    """Asks :mod:`gpu_memory`, in a separate process."""

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

    def budget(self, command: Command, gpu: str, taken: int = TAKEN) -> dict[str, Any]:
        model = self._folder / command.model.replace("/", "-")
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(MODELS[command.model]))
        request = {"argv": command.arguments, "model": str(model), "total": GPUS[gpu]}
        assert self._process.stdin and self._process.stdout
        print(json.dumps(request | {"taken": taken}), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def stop(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterable[Sglang]:
    if installed() != "0.5.18":
        pytest.skip("the formulas are called by the names that they have in SGLang 0.5.18")
    asked = Sglang(tmp_path_factory.mktemp("models"))
    yield asked
    asked.stop()


def activations(model: dict[str, Any], tokens: int) -> int:
    """Bytes that a forward needs at its peak, by the tensors that SGLang makes in it: bfloat16,
    and Triton's kernels for experts, which have a row for each token and expert."""
    hidden, head = model["hidden_size"], model["head_dim"]
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    rows = model.get("num_experts_per_tok", 1)
    inner = model.get("moe_intermediate_size", model["intermediate_size"])
    # The outputs of gate and up, their product, and the output of down.
    feed_forward = rows * (2 * inner + inner + hidden)
    # Queries, keys and values, together and as separate copies, and the result.
    attention = 2 * (heads + 2 * kv_heads) * head + heads * head
    # The input, the output, the residual and its sum.
    return 2 * tokens * (4 * hidden + max(feed_forward, attention))


@pytest.mark.parametrize(("where", "gpu"), CASES)
def test_the_servers_of_a_documented_block_fit_on_the_gpu(
    sglang: Sglang, where: str, gpu: str
) -> None:
    used, forwards, free = TAKEN, 0.0, 0
    for command in DOCUMENTED:
        if command.where != where:
            continue
        # Servers start one after the other: SGLang uses the memory that is free at each start.
        budget = sglang.budget(command, gpu, used)
        assert budget["problem"] is None
        assert 0 < budget["fraction"] < 1
        # The largest forward has room in the pool, and a few more prompts of the usual length.
        assert budget["tokens"] >= 1.05 * budget["forward"] > 0
        used += budget["weights"] + budget["kv"]
        forwards += MARGIN * activations(MODELS[command.model], budget["forward"])
        free = budget["left"]
    assert forwards <= free


def test_the_documentation_has_commands_for_a_gpu() -> None:
    blocks = {command.where.partition(",")[0] for command in DOCUMENTED}
    assert {"README.md", "docs/asyncep.md", "docs/scoring.md"} <= blocks
    asyncep = [command for command in DOCUMENTED if "h2d" in command.arguments]
    assert {gpu for command in asyncep for gpu in command.gpus} == set(GPUS)


@pytest.mark.parametrize(("gpu", "fraction"), [("H100", -1.418), ("H200", -0.372)])
def test_sglangs_own_memory_fraction_leaves_no_kv_with_long_forwards(
    sglang: Sglang, gpu: str, fraction: float
) -> None:
    model = "Qwen/Qwen3-30B-A3B"
    resident = Command("before", model, tuple(OLD.split()))
    budget = sglang.budget(resident, gpu)
    assert budget["fraction"] == fraction
    assert "no GPU memory for the KV cache" in budget["problem"]
    # With h2d, the plugin reports this before the weights are loaded.
    copied = replace(resident, arguments=(*resident.arguments, "--flashmoa-asyncep", "h2d"))
    assert "give --mem-fraction-static" in sglang.budget(copied, gpu)["problem"]


def test_the_figures_of_the_documentation_equal_the_arithmetic(sglang: Sglang) -> None:
    (h2d, *_) = [one for one in DOCUMENTED if "h2d" in one.arguments]
    resident = sglang.budget(Command("", h2d.model, ()), "H200")
    h100, h200 = (sglang.budget(h2d, gpu) for gpu in GPUS)
    text = " ".join((ROOT / "docs" / "asyncep.md").read_text().split())
    assert f"of {resident['weights'] / 1e9:.0f} GB" in text
    assert f"{h100['weights'] / 1e9:.1f} GB" in text
    assert f"a pool of {h100['tokens'] // 1000},000 tokens (H100)" in text
    assert h200["tokens"] == pytest.approx(1e6, rel=0.1)
    assert f"{h100['left'] >> 30} and {h200['left'] >> 30} GiB" in text
    assert h100["forward"] == 131072
    assert f"needs {activations(MODELS[h2d.model], 131072) / 2**30:.1f} GiB" in text
