"""Test ``flashmoa bench asyncep`` on real engines."""

import json
from pathlib import Path

import anyio
import pytest
from flashmoa_bench.prefill.asyncep import ROLES

from flashmoa.cli import bench
from flashmoa.engine.local import LocalEngines
from tests.integration.support import EXPERTS, start_special_engine

pytestmark = pytest.mark.nightly


async def test_asyncep_measures_forwards_memory_and_equal_logprobs(
    engines: LocalEngines, experts_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "asyncep.json"
    # These flags make each batch one forward. The benchmark starts its own engines with them.
    flags = ["--chunked-prefill-size", "512", "--max-prefill-tokens", "512"]
    async with (
        start_special_engine(engines, experts_model, *flags) as resident,
        start_special_engine(engines, experts_model, *flags, "--flashmoa-asyncep", "h2d") as h2d,
        start_special_engine(engines, experts_model, *flags, *ROLES[-1].arguments) as kv_free,
    ):
        command = ["asyncep", "--resident-url", resident.url, "--h2d-url", h2d.url]
        command += ["--kv-free-url", kv_free.url]
        command += ["--tokens", "64", "256", "--prompt", "100", "--repeats", "1"]
        command += ["--peak-tflops", "1", "--json", str(out)]
        assert await anyio.to_thread.run_sync(bench, command) == 0
    found = json.loads(out.read_text())["results"]
    assert [(row["tokens"], row["way"]) for row in found["rows"]] == [
        (size, way) for size in (64, 256) for way in ("resident", "h2d", "kv_free")
    ]
    assert all(row["mfu"] == row["teraflops"] > 0 for row in found["rows"])
    apart = found["logprobs_apart"]
    assert apart["h2d"] == 0 and apart["kv_free"] < 1e-4
    whole, copied, kv_free = found["memory"]
    assert kv_free["kv"] * EXPERTS.layers == whole["kv"]
    assert kv_free["device_experts"] == whole["device_experts"]
    assert whole["device_experts"] > copied["device_experts"] > 0 == whole["host_experts"]
    assert (
        copied["host_experts"] == whole["device_experts"] * (EXPERTS.layers - 1) // EXPERTS.layers
    )
    assert copied["misses"] == 0


async def test_asyncep_on_a_modelled_gpu_hides_copies_in_long_forwards(tmp_path: Path) -> None:
    out = tmp_path / "asyncep.json"
    command = ["asyncep", "--device", "h100_sxm", "--device-model", "Qwen/Qwen3-30B-A3B"]
    command += ["--tokens", "4096", "131072", "--prompt", "4096", "--json", str(out)]
    assert await anyio.to_thread.run_sync(bench, command) == 0
    found = json.loads(out.read_text())["results"]
    short, long = (
        {row["way"]: row for row in found["forwards"] if row["tokens"] == size}
        for size in (4096, 131_072)
    )
    ways = ["AsyncEP h2d", "AsyncEP hybrid", "AsyncEP d2d"]
    exposed = [short[way]["exposed"] for way in ways]
    assert exposed == sorted(exposed, reverse=True) and exposed[-1] > 0
    assert all(long[way]["exposed"] == 0 for way in ways)
    crossings = {row["way"]: row for row in found["crossings"]}
    for row in crossings.values():
        assert 4096 < row["hidden_from"] <= 131_072 and row["hidden_from"] < row["at_peak"]
    assert {row["context"] for row in found["gains"]} == {1024, 4096, 8192, 32_768, 131_072}


async def test_a_dense_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["asyncep", "--device", "h100_sxm", "--device-model", "Qwen/Qwen3-8B"]
    assert await anyio.to_thread.run_sync(bench, command) == 1
    assert "Qwen/Qwen3-8B has no experts" in capsys.readouterr().err
