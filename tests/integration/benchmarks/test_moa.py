"""Run the benchmarks of Mixture-of-Agents, very small, on running engines."""

import json
from pathlib import Path

import pytest
from flashmoa_bench.moa.ways import WAYS

from flashmoa.engine import EngineClient
from tests.integration.benchmarks.conftest import Bench
from tests.unit.moa.scripted_engine import scripted_engine


@pytest.mark.slow
async def test_moa_accuracy_asks_every_way_and_engines_stand_for_missing_ones(
    benches: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def similarities(_client: EngineClient, texts: list[str]) -> list[list[float]]:
        return [[1.0] * len(texts)] * len(texts)

    monkeypatch.setattr(EngineClient, "similarities", similarities)
    rows = [
        {"question": f"What is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in (1, 2)
    ]
    file = tmp_path / "test.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    few = [str(file), "--tokens", "16", "--concurrency", "2", "--embedding-url", "http://e"]
    found = await benches.run("moa-accuracy", ["small", "large"], *few, rounds=False)
    assert found["questions"] == 2
    assert [row["way"] for row in found["rows"]] == list(WAYS)
    assert all(0 <= row["accuracy"] <= 1 and not row["failed"] for row in found["rows"])


@pytest.mark.slow
async def test_moa_judge_compares_ways_with_the_baseline(benches: Bench, tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"Why is {n} odd?"}) for n in (1, 3)))
    few = [str(file), "--tokens", "12", "--ways", "small", "staircase", "--baseline", "one layer"]
    # The first answer is better, whichever it is.
    async with scripted_engine({"default": ["Well: ", "[[A>B]]"]}) as (judge, _):
        found = await benches.run(
            "moa-judge", ["small"], *few, "--judge-url", judge.url, rounds=False
        )
    assert (found["questions"], found["baseline"]) == (2, "one layer")
    rows = {row["way"]: row for row in found["rows"]}
    assert list(rows) == ["small", "staircase"]
    for row in rows.values():
        assert (row["rate"], row["low"], row["high"]) == (0.5, 0.5, 0.5)
        assert (row["judged"], row["failed"]) == (2, 0)
    shown = [body["messages"][-1]["content"] for body in judge.bodies]
    assert len(shown) == 2 * 2 * 2 and all("Why is" in one for one in shown)
    # Each pair is shown in both orders.
    parts = [
        one.partition("# Answer of assistant A\n")[2].split("\n\n# Answer of") for one in shown
    ]
    assert (
        len({first for first, *_ in parts} & {last.partition("\n")[2] for *_, last in parts}) >= 2
    )


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
    # These confidences were drawn. The confidences of a tiny model's tokens would be small.
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
