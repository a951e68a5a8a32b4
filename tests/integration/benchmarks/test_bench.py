"""Run every benchmark, very small, from its command line to its JSON, on running engines."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from flashmoa_bench.harness.routers import installed_routers

from flashmoa.cli import bench
from tests.integration.benchmarks.conftest import Bench
from tests.integration.support import nightly, slow

Found = dict[str, Any]


def handoff(found: Found) -> None:
    assert found["summary"]["cells"] == len(found["cells"]) == 2
    for cell in found["cells"]:
        assert set(cell["seconds"]) == {"fcfs", "linked"}
        assert min(cell["seconds"].values()) >= cell["decode"] > 0
        assert 0 < cell["late_tokens"] <= 64 + 40 + 10


def ablation(found: Found) -> None:
    (row,) = found["rows"]
    assert set(row["seconds"]) == {"baseline", "batched", "streaming", "full"}
    # All tokens are computed once; the last token of a completely cached prompt may be repeated.
    assert all(1 <= value <= 2 for value in row["duplicates"].values())


def chunk(found: Found) -> None:
    assert [len(size["seconds"]) for size in found["sizes"]] == [3, 2, 1]
    assert found["sizes"][-1]["over_single_pass"] == 1


def without_plugin(found: Found) -> None:
    assert [(row["engines"], row["way"]) for row in found["rows"]] == [
        (engines, way) for engines in (2, 1) for way in ("unlinked", "linked", "plugin")
    ]
    assert all(row["whole"] > row["handoff"] > 0 for row in found["rows"])
    unlinked, linked, plugin = found["rows"][:3]
    assert unlinked["steps"] == 0 and unlinked["cached"] < 50 and plugin["cached"] > 400
    # With a model so small, a request may cost more than it computes; then nothing is sent.
    assert 0 <= linked["cached"] <= linked["prompt"]


def schedule(found: Found) -> None:
    assert [row["way"] for row in found["rows"]] == ["fcfs", "sjf", "linked", "linked + sjf"]
    for row in found["rows"]:
        assert 0 < row["seconds"] <= row["p95"] and 0 < row["bound"] <= row["of_fcfs"]


def shared_engine(found: Found) -> None:
    assert [row["way"] for row in found["rows"]] == ["stock", "stock mixed", "known", "linked"]
    assert all(row["seconds"] > row["gap"] > 0 for row in found["rows"])


def tools(found: Found) -> None:
    assert len(found["rows"]) == 8
    for row in found["rows"]:
        assert 0 < row["median"] <= row["p90"] and row["computed"] > 0 and row["bound"] > 0
    linked = {row["workload"]: row["late"] for row in found["rows"] if row["way"] == "linked"}
    assert linked["strangers"] < 200


def interference(found: Found) -> None:
    assert {*found["latency"]} == {"stock", "unlinked", "linked", "alone", "gave_way"}
    for way in ("stock", "unlinked", "linked"):
        figures = found["latency"][way]
        assert 0 < figures["gap"] <= figures["gap_p99"] <= figures["longest_gap"]
        # An upstream alone takes 19 / 50 s.
        assert 0.38 < figures["pipeline"] <= figures["pipeline_p99"]
    assert found["latency"]["alone"]["pipeline"] is None


def workflows(found: Found) -> None:
    # No stock engines are given, so that their ways are missing.
    assert [row["way"] for row in found["rows"]] == ["shared", "warmed", "linked"]
    for row in found["rows"]:
        assert row["same"] == 1 and row["paper"] is row["over_unlinked"] is None
        assert 0 < row["response"] <= row["seconds"] and 0 < row["least"] <= row["seconds"]


def prefill_only(found: Found) -> None:
    mix, rows = found["mix"], found["one engine"]
    assert [row["way"] for row in rows] == ["fcfs", "flashmoa"]
    for row in rows:
        same = row["agreement"]
        assert same["same"] == same["answers"] == mix["requests"]
        assert same["logprob"] is None or same["logprob"] < 1e-3
        # A cached prompt computes its last token again.
        assert mix["unique"] <= row["computed"] <= mix["tokens"]


def score_lists(found: Found) -> None:
    rows = {row["way"]: row for row in found["rows"]}
    assert set(rows) == {"stock", "flashmoa-single", "flashmoa"}
    assert rows["flashmoa-single"]["difference"] < 1e-3
    assert rows["flashmoa"]["difference"] < 1e-3
    assert rows["flashmoa"]["computed"] == 60 + 3 * 8


CASES = [
    (
        "handoff --tps 200 --prefix 64 --upstream 40 --concurrency 1 2",
        "stock flashmoa",
        handoff,
    ),
    (
        "ablation --prefix 100 --pipelines 2 --tps 100 --upstream 40",
        "stock streaming flashmoa",
        ablation,
    ),
    ("chunk --context 96 --chunks 32 64", "flashmoa", chunk),
    ("without-plugin --known 600 --written 150", "writer stock flashmoa", without_plugin),
    (
        "schedule --workflows chain --concurrency 2 --tokens 6",
        "stock-small stock-large small large sjf-small sjf-large",
        schedule,
    ),
    (
        "shared_engine --rows 2:60/20:90/8 --apart 0.01",
        "stock stock-mixed flashmoa",
        shared_engine,
    ),
    (
        "tools --agents 4 --prompt 200 --answer 4 --calls 1 --result 10 --long-result 40 "
        "--seconds 0.1 0.3",
        "stock flashmoa",
        tools,
    ),
    (
        "interference --tokens 10 --pipelines 3 --upstream 20 --prefix 200",
        "stock flashmoa",
        interference,
    ),
    ("workflows --workflows mapreduce --copies 2 --tokens 6", "small large", workflows),
    (
        "prefill-only --scale 0.0005 --lengths 0.05 --concurrency 8",
        "fcfs flashmoa",
        prefill_only,
    ),
    ("score-lists --items 3 --query 60 --item 8", "stock flashmoa", score_lists),
]


@pytest.mark.parametrize(
    ("command", "roles", "check"), [slow(*CASES[0]), *(nightly(*case) for case in CASES[1:])]
)
async def test_a_benchmark_measures_every_way(
    benches: Bench, command: str, roles: str, check: Callable[[Found], None]
) -> None:
    name, *arguments = shlex.split(command)
    check(await benches.run(name, roles.split(), *arguments))


@pytest.mark.nightly
async def test_handoff_resumes_what_is_measured(benches: Bench) -> None:
    grid = ["--tps", "200", "--prefix", "64", "--upstream", "20", "--policies", "fcfs"]
    roles = ["stock", "flashmoa"]
    first = await benches.run("handoff", roles, *grid, "--concurrency", "1")
    both = await benches.run("handoff", roles, *grid, "--concurrency", "1", "2", "--resume")
    assert both["cells"][0] == first["cells"][0]
    assert [cell["workload"]["concurrency"] for cell in both["cells"]] == [1, 2]


@pytest.mark.nightly
async def test_routers_are_measured_and_resumed(benches: Bench) -> None:
    few = ["--mix", "short-reviews", "--share", "0.002", "--engines", "2", "--concurrency", "4"]
    some = ["--routers", "round_robin", "flashmoa router", "--seeds", "1", "0"]
    roles = ["engine-1", "engine-2"]
    first = await benches.run("router-measured", roles, *few, *some, rounds=False)
    # All installed routers. Two are measured already.
    both = await benches.run("router-measured", roles, *few, "--resume", rounds=False)
    cells = both["cells"]
    assert cells[:4] == first["cells"]
    found = {(cell["router"], cell["seed"]) for cell in cells}
    assert len(found) == len(cells) == 4 + len(installed_routers()) - 1
    for cell in cells:
        assert 0 < cell["p50"] <= cell["p99"] <= cell["seconds"]
        # A cached prompt computes its last token again.
        assert cell["unique"] <= cell["computed"] <= cell["tokens"]


@pytest.mark.slow
async def test_an_unreachable_engine_is_reported_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["chunk", "--flashmoa-url", "http://127.0.0.1:9"]
    assert await anyio.to_thread.run_sync(bench, command) == 1
    message = capsys.readouterr().err
    assert message.startswith("flashmoa bench chunk: http://127.0.0.1:9 cannot be reached")


@pytest.mark.nightly
async def test_coding_agents_find_their_prompts_where_there_is_room(tmp_path: Path) -> None:
    """Their engines parse tool calls. The engines of other tests do not."""
    file, size = tmp_path / "results.json", "--agents 2 --turns 3 --scale 10 --pool 2 --shape test"
    command = ["coding-agents", *size.split(), "--cache", str(tmp_path), "--json", str(file)]
    assert await anyio.to_thread.run_sync(bench, command) == 0
    results = json.loads(file.read_text())["results"]
    assert [row["way"] for row in results["rows"]] == ["stock", "flashmoa"]
    # The prompts have the intended length, and so the pool has the intended size.
    assert results["pool"] == pytest.approx(2 * results["tokens"], rel=0.05)
    for row in results["rows"]:
        assert row["found"] > 0 and 0 < row["p50"] <= row["p99"] <= row["seconds"]


@pytest.mark.nightly
async def test_score_accuracy_asks_each_text_both_ways(benches: Bench, tmp_path: Path) -> None:
    file = tmp_path / "snippets.txt"
    file.write_text("1\t2.5\tA lovely stay.\n2\t0.1\tA stay.\n3\t-3\tCold tea.\n")
    found = await benches.run("score-accuracy", ["flashmoa"], str(file), "--tokens", "2")
    assert [(row["question"], row["texts"]) for row in found["rows"]] == [
        ("words", 2),
        ("letters", 2),
    ]
