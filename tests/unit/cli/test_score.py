"""``flashmoa score`` without an engine: files that it must not touch, and its help."""

from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from pytest import CaptureFixture

from flashmoa.cli import score
from flashmoa.cli.score import main
from flashmoa.engine import EngineClient
from flashmoa.errors import EngineError
from flashmoa.scoring.bulk import NotResumable, resume

SCORES = '{"line": 1, "candidates": []}\n'


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Write an input with one line, and an output; return the arguments for these files."""
    source, out = tmp_path / "input.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"context": "One", "candidates": [" two"]}\n')
    out.write_text(SCORES)
    return [str(source), "--out", str(out), "--engine", "http://127.0.0.1:9"]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("typo.jsonl", "No such file"),
        ("input.jsonl", "cannot be reached"),
        ("out.jsonl", "must be three different files"),
    ],
)
def test_overwrite_needs_an_input_and_an_engine(
    tmp_path: Path, source: str, problem: str, arguments: list[str], capsys: CaptureFixture
) -> None:
    arguments[0] = str(tmp_path / source)
    try:
        status = main([*arguments, "--overwrite"])
    except SystemExit as refused:
        status = refused.code
    assert status == (2 if source == "out.jsonl" else 1)
    assert problem in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == SCORES


def test_overwrite_needs_a_readable_input(tmp_path: Path, arguments: list[str]) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(IsADirectoryError):
        resume(tmp_path, out, tmp_path / "errors.jsonl", overwrite=True)
    assert out.read_text() == SCORES


def test_a_file_of_errors_of_another_kind_is_kept(tmp_path: Path, arguments: list[str]) -> None:
    source, errors = Path(arguments[0]), tmp_path / "out.errors.jsonl"
    errors.write_text('{"time": 1}\n')
    with pytest.raises(NotResumable, match=r"out\.errors\.jsonl exists and is not a file of"):
        resume(source, tmp_path / "new.jsonl", errors)
    assert errors.read_text() == '{"time": 1}\n'
    resume(source, tmp_path / "new.jsonl", errors, overwrite=True)
    assert errors.read_text() == ""


@pytest.mark.parametrize("error", [EngineError("the engine ended"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("overwrite", "advice"),
    [
        ([], "run the same command again to continue"),
        (["--overwrite"], "run it again without --overwrite to continue"),
    ],
)
def test_a_stopped_run_says_how_to_continue(
    overwrite: list[str],
    advice: str,
    error: BaseException,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: CaptureFixture,
) -> None:
    monkeypatch.setattr(EngineClient, "info", AsyncMock())
    monkeypatch.setattr(score, "score_file", AsyncMock(side_effect=error))
    main([*arguments, *overwrite])
    assert advice in capsys.readouterr().err


@pytest.mark.parametrize("out", ["r.v1", "r.v2", "r.jsonl"])
def test_each_output_has_its_own_file_of_errors(
    tmp_path: Path, out: str, arguments: list[str]
) -> None:
    """Without an engine, a run ends after it has opened its files."""
    arguments[2] = str(tmp_path / out)
    assert main(arguments) == 1
    assert (tmp_path / f"{out.removesuffix('.jsonl')}.errors.jsonl").exists()


def test_help_names_all_exit_statuses(capsys: CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    statuses = capsys.readouterr().out.partition("exit status: ")[2]
    assert all(f"{status} " in statuses for status in (0, 1, 2, 3, 130))
