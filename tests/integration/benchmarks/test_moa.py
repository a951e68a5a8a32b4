"""Run the benchmarks of Mixture-of-Agents, very small, on running engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flashmoa_bench.moa import accuracy

from flashmoa.engine import EngineClient
from tests.integration.benchmarks.conftest import Bench

pytestmark = pytest.mark.anyio


@pytest.mark.slow
async def test_moa_accuracy_asks_every_way_and_engines_stand_for_missing_ones(
    benches: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def embed(_client: EngineClient, texts: list[str], **_: object) -> list[list[float]]:
        return [[1.0, 2.0]] * len(texts)

    monkeypatch.setattr(EngineClient, "embed", embed)
    rows = [
        {"question": f"What is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in (1, 2)
    ]
    file = tmp_path / "test.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    few = [str(file), "--tokens", "16", "--concurrency", "2", "--embedding-url", "http://e"]
    found = await benches.run("moa-accuracy", ["small", "large"], *few, rounds=False)
    assert found["questions"] == 2
    assert [row["way"] for row in found["rows"]] == list(accuracy.WAYS)
    assert all(0 <= row["accuracy"] <= 1 and not row["failed"] for row in found["rows"])


@pytest.mark.nightly
async def test_moa_latency_plays_recorded_answers_and_resumes(benches: Bench) -> None:
    sizes = ["small", "medium", "large"]
    engines = [*sizes, *(f"stock-{size}" for size in sizes)]
    few = ["--scale", "0.1", "--longest", "60", "--threshold", "0"]
    found = await benches.run("moa-latency", engines, *few, "--questions", "1", rounds=False)
    cells = {cell["way"]: cell for cell in found["cells"]}
    assert len(cells) == 6
    for cell in cells.values():
        assert 0 < cell["least"] < cell["seconds"] and cell["first_token"] < cell["seconds"]
    tree, overlap, full = (cells[way] for way in ("tree", "tree + overlap", "full"))
    # Both have the lengths of the same recorded answers.
    assert tree["written"] == overlap["written"] < cells["all-to-all"]["written"]
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


@pytest.mark.nightly
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
        early = rows[f"{kind} of 2: prefix-cached, 2"]
        assert early["rounds"] > rows[f"{kind} of 2: prefix-cached, 8"]["rounds"] > 1
    assert all(cell["tokens"] == 40 for cell in found["cells"])
