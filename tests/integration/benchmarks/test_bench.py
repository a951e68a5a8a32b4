"""Run every benchmark, very small, from its command line to its JSON, on running engines."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import anyio
import pytest
from flashmoa_bench.harness.routers import installed_routers
from flashmoa_bench.linking import stream_load

from flashmoa.cli import bench
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.support import RIDING, start_special_engine

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


class Bench:
    """Runs benchmarks on the session's engines, each in a separate event loop."""

    def __init__(self, stock: str, plugin: str, other: str, folder: Path) -> None:
        self._urls = {"stock": stock, "flashmoa": plugin, "streaming": plugin, "sjf": plugin}
        self._urls |= {"fcfs": stock, "flashmoa-2": other, "writer": other}
        self._urls |= {"small": plugin, "medium": plugin, "large": plugin}
        self._urls |= {f"stock-{size}": stock for size in ("small", "medium", "large")}
        self._urls |= {"stock-mixed": stock, "engine-1": plugin, "engine-2": other}
        self._json = folder / "results.json"

    async def run(
        self, name: str, roles: list[str], *arguments: str, rounds: bool = True
    ) -> dict[str, Any]:
        """Run a benchmark, once if it has rounds, and return its results."""
        urls = [part for role in roles for part in (f"--{role}-url", self._urls[role])]
        repeats = ["--repeats", "1"] if rounds else []
        command = [name, *repeats, "--json", str(self._json), *urls, *arguments]
        assert await anyio.to_thread.run_sync(bench.main, command) == 0
        document = json.loads(self._json.read_text())
        assert document["bench"] == name.replace("-", "_")
        assert document["machine"]["cpu"] and document["versions"]["flashmoa"]
        assert any(engine["plugin"] for engine in document["engines"].values())
        return document["results"]


@pytest.fixture
def benches(
    plain_engine: LocalEngine, downstream: LocalEngine, engine: LocalEngine, tmp_path: Path
) -> Bench:
    return Bench(plain_engine.url, downstream.url, engine.url, tmp_path)


async def test_handoff_measures_the_grid_and_draws_a_picture(
    benches: Bench, tmp_path: Path
) -> None:
    picture = tmp_path / "map.svg"
    grid = ["--tps", "200", "--prefix", "64", "--upstream", "40", "--concurrency", "1", "2"]
    found = await benches.run("handoff", ["stock", "flashmoa"], *grid, "--picture", str(picture))
    assert len(found["cells"]) == 2
    for cell in found["cells"]:
        assert set(cell["seconds"]) == {"fcfs", "linked"}
        assert min(cell["seconds"].values()) >= cell["decode"] > 0
        assert 0 < cell["late_tokens"] <= 64 + 40 + 10
    assert found["summary"]["cells"] == 2
    assert picture.read_text().startswith("<svg")


async def test_handoff_resumes_what_is_measured(
    benches: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ["--tps", "200", "--prefix", "64", "--upstream", "20", "--policies", "fcfs"]
    roles = ["stock", "flashmoa"]
    first = await benches.run("handoff", roles, *grid, "--concurrency", "1")
    both = await benches.run("handoff", roles, *grid, "--concurrency", "1", "2", "--resume")
    assert both["cells"][0] == first["cells"][0]
    assert [cell["workload"]["concurrency"] for cell in both["cells"]] == [1, 2]


async def test_ablation_measures_every_variant(benches: Bench) -> None:
    small = ["--prefix", "100", "--pipelines", "2", "--tps", "100", "--upstream", "40"]
    found = await benches.run("ablation", ["stock", "streaming", "flashmoa"], *small)
    (row,) = found["rows"]
    assert set(row["seconds"]) == {"baseline", "batched", "streaming", "full"}
    # All tokens are computed once; the last token of a completely cached prompt may be repeated.
    assert all(1 <= value <= 2 for value in row["duplicates"].values())


async def test_chunk_measures_every_size_and_a_single_pass(benches: Bench) -> None:
    found = await benches.run("chunk", ["flashmoa"], "--context", "96", "--chunks", "32", "64")
    assert [len(size["seconds"]) for size in found["sizes"]] == [3, 2, 1]
    assert found["sizes"][-1]["over_single_pass"] == 1


async def test_first_token_measures_every_prompt_length(benches: Bench) -> None:
    found = await benches.run("first_token", ["flashmoa"], "--prompts", "60", "300")
    assert [length["tokens"] for length in found["lengths"]] == [60, 300]
    # Exactly the tokens that came with the request were left.
    assert [length["late_tokens"] for length in found["lengths"]] == [10, 10]
    assert found["lengths"][0]["growth"] == 1


async def test_without_plugin_measures_every_way_on_two_engines_and_on_one(
    benches: Bench,
) -> None:
    roles = ["writer", "stock", "flashmoa"]
    found = await benches.run("without-plugin", roles, "--known", "600", "--written", "150")
    assert [(row["engines"], row["way"]) for row in found["rows"]] == [
        (engines, way) for engines in (2, 1) for way in ("unlinked", "linked", "plugin")
    ]
    assert all(row["whole"] > row["handoff"] > 0 for row in found["rows"])
    unlinked, linked, plugin = found["rows"][:3]
    assert unlinked["steps"] == 0 and unlinked["cached"] < 50
    assert plugin["cached"] > 400
    # With a model so small, a request may cost more than it computes; then nothing is sent.
    assert 0 <= linked["cached"] <= linked["prompt"]


async def test_client_measures_the_gap_with_and_without_links(benches: Bench) -> None:
    found = await benches.run("client", ["flashmoa"], "--prompts", "300")
    (cost,) = found["costs"]
    assert cost["prompt_tokens"] > 200
    assert 0 < cost["stock"] < 1 and 0 < cost["linked"] < 1


async def test_schedule_measures_every_way(benches: Bench) -> None:
    found = await benches.run(
        "schedule", ["stock", "flashmoa", "sjf"], "--concurrency", "3", "--prefixes", "own"
    )
    assert [row["way"] for row in found["rows"]] == ["fcfs", "sjf", "linked", "linked + sjf"]
    assert all(0 < row["mean"] <= row["p95"] for row in found["rows"])


async def test_shared_engine_measures_every_way(benches: Bench) -> None:
    roles = ["stock", "stock-mixed", "flashmoa"]
    found = await benches.run("shared_engine", roles, "--rows", "2:60/20:90/8", "--apart", "0.01")
    assert [row["way"] for row in found["rows"]] == ["stock", "stock mixed", "known", "linked"]
    assert all(row["seconds"] > row["gap"] > 0 for row in found["rows"])


async def test_tools_measures_every_workload(benches: Bench) -> None:
    small = ["--agents", "4", "--prompt", "200", "--answer", "4", "--calls", "1"]
    small += ["--result", "10", "--long-result", "40", "--seconds", "0.1", "0.3"]
    found = await benches.run("tools", ["stock", "flashmoa"], *small)
    assert len(found["rows"]) == 8
    for row in found["rows"]:
        assert 0 < row["median"] <= row["p90"] and row["computed"] > 0 and row["bound"] > 0
    linked = {row["workload"]: row["late"] for row in found["rows"] if row["way"] == "linked"}
    assert linked["strangers"] < 200


async def test_stream_load_reads_the_time_of_the_engines_processes(
    engines: LocalEngines, model: Path
) -> None:
    arguments = Namespace(seed=0, decoding=2, known=40, streams=3, tps=80, seconds=2)
    async with (
        start_special_engine(engines, model, environment=RIDING) as engine,
        EngineClient(engine.url) as client,
    ):
        load = await stream_load.play(client, engine, arguments, "growing")
    assert load.steps_per_second > 0 and load.step_ms > 0 and load.http_share > 0
    assert load.increments_per_second > 0 and 0 < load.ahead <= 1


async def test_interference_measures_throughput_and_latency(benches: Bench) -> None:
    small = ["--requests", "6", "--concurrency", "3", "--pairs", "1"]
    small += ["--tokens", "10", "--pipelines", "3", "--upstream", "20", "--prefix", "200"]
    found = await benches.run("interference", ["stock", "flashmoa"], *small)
    assert found["throughput"]["ratio"] > 0
    assert {*found["latency"]} == {"stock", "unlinked", "linked", "alone", "gave_way"}
    for way in ("stock", "unlinked", "linked"):
        figures = found["latency"][way]
        assert 0 < figures["gap"] <= figures["gap_p99"] <= figures["longest_gap"]
        # An upstream alone takes 19 / 50 s.
        assert 0.38 < figures["pipeline"] <= figures["pipeline_p99"]
    assert found["latency"]["alone"]["pipeline"] is None


async def test_interference_measures_pressure(benches: Bench) -> None:
    small = ["--pipelines", "3", "--prefix", "60", "--upstream", "20", "--output", "4"]
    engines = ["stock", "flashmoa"]
    found = await benches.run("interference", engines, "--measure", "pressure", *small)
    assert set(found) == {"pressure"}
    assert found["pressure"]["linked"]["completion"] > 0


async def test_workflows_without_stock_engines_measure_the_other_ways(benches: Bench) -> None:
    small = ["--workflows", "mapreduce", "--copies", "2", "--tokens", "6"]
    found = await benches.run("workflows", ["small", "large"], *small)
    (row,) = found["rows"]
    # No stock engines are given, so that their ways are missing.
    assert set(row["seconds"]) == {"shared", "warmed", "linked"}
    assert row["texts"] == 3 * 2 * 4 and row["paper"] is None


async def test_prefill_only_measures_one_engine_and_several(benches: Bench) -> None:
    tiny = ["--scale", "0.0005", "--lengths", "0.05", "--concurrency", "8"]
    found = await benches.run("prefill-only", ["fcfs", "flashmoa", "flashmoa-2"], *tiny)
    mix, one, two = found["mix"], found["one engine"], found["2 engines"]
    assert [row["way"] for row in one] == ["fcfs", "flashmoa"]
    assert {row["way"] for row in two} >= {"round_robin", "flashmoa router"}
    for row in one + two:
        same = row["agreement"]
        assert same["same"] == same["answers"] == mix["requests"]
        assert same["logprob"] is None or same["logprob"] < 1e-3
        # A cached prompt computes its last token again.
        assert mix["unique"] <= row["computed"] <= mix["tokens"]


async def test_routers_are_measured_beside_the_prediction_and_resumed(benches: Bench) -> None:
    few = ["--mix", "short-reviews", "--share", "0.002", "--engines", "2", "--concurrency", "4"]
    some = ["--routers", "round_robin", "flashmoa router", "--seeds", "1", "0"]
    roles = ["engine-1", "engine-2"]
    first = await benches.run("router-measured", roles, *few, *some, rounds=False)
    # All that are installed, of which two are measured already.
    both = await benches.run("router-measured", roles, *few, "--resume", rounds=False)
    cells = both["cells"]
    assert cells[:4] == first["cells"]
    found = {(cell["router"], cell["seed"]) for cell in cells}
    assert len(found) == len(cells) == 4 + len(installed_routers()) - 1
    for cell in cells:
        assert 0 < cell["p50"] <= cell["p99"] <= cell["seconds"] and cell["predicted"] > 0
        # A cached prompt computes its last token again.
        assert cell["unique"] <= cell["computed"] <= cell["tokens"]


async def test_an_unreachable_engine_is_reported_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["chunk", "--flashmoa-url", "http://127.0.0.1:9"]
    assert await anyio.to_thread.run_sync(bench.main, command) == 1
    message = capsys.readouterr().err
    assert message.startswith("flashmoa bench chunk: http://127.0.0.1:9 cannot be reached")


async def test_moa_measures_accuracy_and_latency_of_every_way(benches: Bench) -> None:
    sizes = ("small", "medium", "large")
    few = ["--questions", "1", "--timed", "1", "--tokens", "40", "--concurrency", "2"]
    engines = [*sizes, *(f"stock-{size}" for size in sizes)]
    found = await benches.run("moa", engines, *few)
    rows = {row["way"]: row for row in found["rows"]}
    assert found["questions"] == 3
    assert set(rows["full"]["accuracy"]) == {"easy", "medium", "hard", "all"}
    assert rows["all-to-all"]["relative"]["all"] == 1
    assert rows["one layer"]["relative_first"] == 1
    assert set(rows["full"]["used"]) == set(sizes)
    for way in ("undecided", "full", "as published"):
        assert rows[way]["deciding_on_path"] > 0
    assert rows["tree + overlap"]["deciding_on_path"] is None
    # There are 9 + 3 + 1 agents, and every engine of these tests reports cached tokens.
    for way in ("tree", "tree + overlap"):
        prompts = rows[way]["prompts"]
        assert len(prompts) == 13 and "3.1" in prompts
        assert None not in [one["late"] for one in prompts.values()]
    assert all(one["streamed"] == 0 for one in rows["tree"]["prompts"].values())
    computed = {
        way: rows[way]["prompts"]["2.1"]["late"] + rows[way]["prompts"]["2.1"]["streamed"]
        for way in ("appended", "staircase")
    }
    assert computed["appended"] < computed["staircase"]
    assert not any(row["failed"] for row in rows.values())


async def test_moa_latency_plays_recorded_answers_and_resumes(benches: Bench) -> None:
    sizes = ["small", "medium", "large"]
    engines = [*sizes, *(f"stock-{size}" for size in sizes)]
    few = ["--scale", "0.1", "--longest", "60", "--threshold", "0", "--widths", "2"]
    found = await benches.run("moa-latency", engines, *few, "--questions", "1", rounds=False)
    cells = {cell["way"]: cell for cell in found["cells"]}
    assert len(cells) == 7
    for cell in cells.values():
        assert 0 < cell["least"] < cell["seconds"] and cell["first_token"] < cell["seconds"]
        assert cell["layers"] == sorted(cell["layers"])
    tree, overlap, full = (cells[way] for way in ("tree", "tree + overlap", "full"))
    # Both have the lengths of the same recorded answers.
    assert tree["written"] == overlap["written"] < cells["all-to-all"]["written"]
    assert all(layer["streamed"] == 0 for layer in tree["prompts"].values())
    # Short prompts of one way may all be cached by others, or come too late to be streamed.
    linked = (overlap, cells["undecided"], full, cells["as published"])
    streamed = {way["way"]: way["prompts"] for way in linked}
    assert any(layer["streamed"] for way in streamed.values() for layer in way.values()), streamed
    # Clusters are left at their second answer, whatever that is, and not at their first. Empty
    # answers, which tiny models give, do not count.
    assert full["left"] and full["deciding"] > 0 and tree["deciding"] is None
    left = [(complete, quality) for complete, quality, left, _ in full["decisions"] if left]
    assert left and all(complete >= 2 for complete, _ in left)
    # Confidences are those that were drawn, not those of a tiny model's tokens, which are small.
    assert all(quality > 0.5 for _, quality in left)
    undecided = cells["undecided"]
    assert not undecided["left"] and undecided["decisions"]

    more = await benches.run(
        "moa-latency",
        engines,
        *few,
        "--questions",
        "2",
        "--ways",
        "tree + overlap",
        "--resume",
        rounds=False,
    )
    assert more["cells"][: len(cells)] == found["cells"]
    assert [cell["way"] for cell in more["cells"][len(cells) :]] == ["tree + overlap"] * (
        len(more["cells"]) - len(cells)
    )


async def test_staircases_measures_mixtures_and_debates(benches: Bench) -> None:
    sizes = ["small", "medium", "large"]
    engines = [*sizes, *(f"stock-{size}" for size in sizes)]
    few = ["--equal", "40", "--questions", "1", "--proposers", "2", "--first", "2", "8"]
    found = await benches.run("staircases", engines, *few, rounds=False)
    rows = {row["way"]: row for row in found["rows"]}
    assert len(rows) == 10
    for kind in ("mixture", "debate"):
        whole = rows[f"{kind} of 2: whole answers"]
        assert whole["relative_first"] == whole["relative_rate"] == 1 and whole["rounds"] == 1
        early = rows[f"{kind} of 2: rounds, 2"]
        assert early["rounds"] > rows[f"{kind} of 2: rounds, 8"]["rounds"] > 1
        assert early["first_token"] < whole["first_token"]
    assert all(cell["tokens"] == 40 for cell in found["cells"])


async def test_score_lists_compares_stock_and_ours(benches: Bench) -> None:
    sizes = ["--items", "3", "--query", "60", "--item", "8"]
    found = await benches.run("score-lists", ["stock", "flashmoa"], *sizes)
    rows = {row["way"]: row for row in found["rows"]}
    assert set(rows) == {"stock", "flashmoa", "flashmoa-streamed"}
    for way in ("flashmoa", "flashmoa-streamed"):
        assert rows[way]["difference"] < 1e-3
        assert rows[way]["computed"] == 60 + 3 * 8
        assert 0 < rows[way]["first"] <= rows[way]["seconds"]


async def test_score_accuracy_asks_each_text_both_ways(benches: Bench, tmp_path: Path) -> None:
    file = tmp_path / "snippets.txt"
    file.write_text("1\t2.5\tA lovely stay.\n2\t0.1\tA stay.\n3\t-3\tCold tea.\n")
    found = await benches.run("score-accuracy", ["flashmoa"], str(file), "--tokens", "2")
    assert [(row["question"], row["texts"]) for row in found["rows"]] == [
        ("words", 2),
        ("letters", 2),
    ]
