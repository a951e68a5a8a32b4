"""Score files: records and skipped lines are written, and a killed run is continued."""

import json
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

from flashmoa.cli.score import main
from flashmoa.engine.local import LocalEngine
from tests.integration.support import Words
from tests.waiting import until

LINES, SCORED = 60, 56
BAD = [21, 41, 51]
COMMAND = "from flashmoa.cli import main; main()"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_alike(found: Path, expected: Path) -> None:
    """Compare records but for the last digits, which depend on the requests that share a batch."""
    for record, other in zip(read(found), read(expected), strict=True):
        assert record.keys() == other.keys()
        for key, value in record.items():
            is_number = key in ("probabilities", "logprobs", "mass")
            assert value == (pytest.approx(other[key], abs=1e-4) if is_number else other[key])


async def score(engine: LocalEngine, source: Path, out: Path, *more: str) -> int:
    arguments = [str(source), "--out", str(out), "--engine", engine.url, *more]
    return await to_thread.run_sync(main, arguments)


@pytest.fixture
def lines(tmp_path: Path, words: Words) -> Path:
    texts: list[str] = []
    for number in range(LINES):
        context, line = words(20 + number % 7, number), {"id": f"n{number}"}
        if number % 4 == 0:
            line |= {"context": context, "candidates": [" the", " and", " a lake"]}
        elif number % 4 == 1:
            line |= {"context": context, "labels": {"yes": " the", "no": " and"}}
        elif number % 4 == 2:
            line |= {"messages": [{"role": "user", "content": context}], "options": ["one", "two"]}
        else:
            line |= {"context": context, "options": ["one", "two"], "multiple": True}
        texts.append(json.dumps(line))
    texts[20] = "no JSON"
    texts[21] = ""
    texts[40] = json.dumps({"context": "x", "candidates": ["", " a"]})
    texts[50] = json.dumps({"context": words(13000, 1), "candidates": [" a", " the"]})
    path = tmp_path / "input.jsonl"
    path.write_text("\n".join(texts))
    return path


async def test_killed_and_resumed_run_writes_what_one_run_writes(
    engine: LocalEngine, lines: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert await score(engine, lines, whole) == 3
    summary = capfd.readouterr().out
    assert f"{SCORED} lines scored" in summary and " computed" in summary
    assert "3 lines were skipped" in summary
    records = read(whole)
    scored = [number for number in range(1, LINES + 1) if number not in (*BAD, 22)]
    assert [one["line"] for one in records] == scored
    assert [one["id"] for one in records[:2]] == ["n0", "n1"]
    assert [one["line"] for one in read(tmp_path / "whole.errors.jsonl")] == BAD

    command = [sys.executable, "-c", COMMAND, "score", str(lines), "--out", str(parts)]
    command += ["--engine", engine.url, "--concurrency", "1"]
    async with await anyio.open_process(command) as process:
        await until(lambda: parts.exists() and parts.read_bytes().count(b"\n") >= 25)
        process.kill()
    # Make both files look as if the process was killed while it wrote a line.
    written = parts.read_bytes()
    assert 25 <= written.count(b"\n") < SCORED
    parts.write_bytes(written[:-20])
    with (tmp_path / "parts.errors.jsonl").open("a") as report:
        report.write('{"line": 59, "error": "written by')
    assert await score(engine, lines, parts) == 3
    assert "lines already" in capfd.readouterr().out
    assert_alike(parts, whole)
    assert_alike(tmp_path / "parts.errors.jsonl", tmp_path / "whole.errors.jsonl")
    # A complete run has nothing left to do.
    before = parts.read_bytes()
    assert await score(engine, lines, parts) == 3
    assert parts.read_bytes() == before


async def test_documents_are_ranked_and_a_second_run_leaves_them(
    engine: LocalEngine, tmp_path: Path
) -> None:
    source, out = tmp_path / "input.jsonl", tmp_path / "out.jsonl"
    line = {"id": "r", "query": "lake", "documents": ["Tea.", "A lake.", "Air."]}
    source.write_text(json.dumps(line))
    for _ in range(2):
        assert await score(engine, source, out) == 0
        (record,) = read(out)
        assert (record["id"], record["documents"]) == ("r", 3)
        assert sorted(record["ranked"]) == [0, 1, 2]
        assert record["scores"] == sorted(record["scores"], reverse=True)


async def test_file_that_is_not_a_file_of_scores_is_left_alone(
    engine: LocalEngine, lines: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    for content, problem in [
        ("my notes", "is not a file of scores"),
        ('{"a": 1}\n', "is not a file of scores"),
        ('{"line": 2, "id": "other", "candidates": []}\n', "does not have the scores of"),
        ('{"line": 999, "candidates": []}\n', "does not have the scores of"),
    ]:
        out.write_text(content)
        assert await score(engine, lines, out) == 1
        assert problem in capfd.readouterr().err
        assert out.read_text() == content
    assert await score(engine, lines, out, "--overwrite") == 3
    assert len(read(out)) == SCORED


async def test_lost_engine_is_reported_and_written_scores_are_kept(
    lines: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    arguments = [str(lines), "--out", str(out), "--engine", "http://127.0.0.1:9"]
    assert await to_thread.run_sync(main, arguments) == 1
    assert "cannot be reached" in capfd.readouterr().err
    assert out.read_bytes() == b""
    out.unlink()
    missing = [str(tmp_path / "none.jsonl"), "--out", str(out)]
    assert await to_thread.run_sync(main, missing) == 1
    assert "none.jsonl" in capfd.readouterr().err
    assert not out.exists()


ABOVE_VOCABULARY: list[dict[str, Any]] = [
    {"context": [5, 2_000_000], "candidates": [" yes"]},
    {"context": [5, 2_000_000], "candidates": [[7]]},
    {"context": "One", "candidates": [[2_000_000], " two"]},
    {"context": "One", "candidates": [[7, 2_000_000], " two"]},
    {"context": "One", "labels": {"yes": [7, 2_000_000]}},
    {"context": "One", "labels": {"yes": [2_000_000], "no": " two"}},
]


async def test_line_with_an_unknown_token_is_skipped(engine: LocalEngine, tmp_path: Path) -> None:
    source, out = tmp_path / "input.jsonl", tmp_path / "out.jsonl"
    good = {"context": "One", "candidates": [" two", " trek"]}
    source.write_text("\n".join(map(json.dumps, [*ABOVE_VOCABULARY, good])))
    assert await score(engine, source, out) == 3
    assert [record["line"] for record in read(out)] == [len(ABOVE_VOCABULARY) + 1]
    errors = read(tmp_path / "out.errors.jsonl")
    assert [error["line"] for error in errors] == list(range(1, len(ABOVE_VOCABULARY) + 1))
    assert engine.is_running()
