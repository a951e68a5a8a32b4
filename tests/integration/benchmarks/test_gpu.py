"""Run everything that is measured on one GPU, very small, on engines of this CPU.

It takes three minutes, and more on a busy machine: five engines import SGLang.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_stage_of_the_checks_on_a_gpu_runs_on_a_cpu(tmp_path: Path) -> None:
    expected, out = tmp_path / "expected.json", tmp_path / "out"
    times = [sys.executable, "-m", "flashmoa_bench.gpu.forwards", str(expected)]
    subprocess.run(times, check=True)
    command = [
        sys.executable, "-m", "flashmoa_bench.gpu", "--cpu",
        "--budget", "860", "--start-limit", "400",
        "--out", str(out), "--expected", str(expected), "--cache", str(ROOT / ".cache"),
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
    results = json.loads((out / "results.json").read_text())
    found = results["stages"]
    assert not [name for name in found if name.endswith("problem")]
    assert {start["name"] for start in results["engines"] if start["problem"] is None} == {
        "stock", "plugin", "mixed", "resident", "h2d",
    }  # fmt: skip
    settings = {start["name"]: start["settings"] for start in results["engines"]}
    assert not settings["plugin"]["disable_overlap_schedule"]
    assert found["1"]["engines_agree"] and found["1"]["repeats"] == [True, True]
    assert found["1"]["depends_on_prompt"] == [True, True]
    # In float32 no answer is rounded otherwise.
    exact = found["2"]
    assert exact["linked_and_unlinked"] == {"equal": 8, "first_token_equal": 8, "of": 8}
    assert exact["status"] == {"hit": 8} and exact["streamed_tokens"] > 0
    assert exact["kv_is_back"]
    (cell,) = found["3"]["results"]["cells"]
    assert cell["bound"] > 0 and set(cell["seconds"]) == {"fcfs", "linked"}
    for stock in ("stock", "mixed"):
        rows = found[f"4 chains {stock} 3:60/20:90/8"]["results"]["rows"]
        assert [row["way"] for row in rows] == ["stock", "known", "linked"]
        stranger = found[f"4 stranger {stock}"]["results"]["latency"]
        assert stranger["linked"]["gap_p99"] > 0 < stranger["stock"]["gap_p99"]
    assert found["5"]["of_stock"]["plugin"] > 0
    assert all(seconds > 0 for seconds in found["6"]["decodes"].values())
    assert found["6"]["median_error"]["prefills"] > 0
    rows = found["7"]["results"]["rows"]
    assert [(row["tokens"], row["way"]) for row in rows] == [
        (size, way) for size in (64, 256) for way in ("resident", "h2d")
    ]
