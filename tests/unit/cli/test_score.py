"""``flashmoa score`` without an engine: files that it must not touch, and its help."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from anyio import to_thread

from flashmoa.cli import score
from flashmoa.cli.score import main
from flashmoa.engine import EngineClient
from flashmoa.errors import EngineError
from flashmoa.scoring.bulk import resume

SCORES = '{"line": 1, "candidates": []}\n'


@pytest.mark.parametrize(
    ("source", "problem"), [("typo.jsonl", "No such file"), ("input.jsonl", "cannot be reached")]
)
async def test_overwrite_needs_an_input_and_an_engine(
    tmp_path: Path, source: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "input.jsonl").write_text('{"context": "One", "candidates": [" two"]}\n')
    out = tmp_path / "out.jsonl"
    out.write_text(SCORES)
    arguments = [str(tmp_path / source), "--out", str(out), "--engine", "http://127.0.0.1:9"]
    # anyio.run() needs a thread without the session's event loop.
    status = await to_thread.run_sync(partial(main, [*arguments, "--overwrite"]))
    assert status == 1
    assert problem in capsys.readouterr().err
    assert out.read_text() == SCORES


@pytest.mark.parametrize("error", [EngineError("the engine ended"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("overwrite", "advice"),
    [
        ([], "run the same command again to continue"),
        (["--overwrite"], "run it again without --overwrite to continue"),
    ],
)
async def test_a_stopped_run_says_how_to_continue(
    tmp_path: Path,
    overwrite: list[str],
    advice: str,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def answer(*_: object, **__: object) -> None:
        pass

    async def stop(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(EngineClient, "info", answer)
    monkeypatch.setattr(score, "score_file", stop)
    (tmp_path / "input.jsonl").touch()
    arguments = [str(tmp_path / "input.jsonl"), "--out", str(tmp_path / "out.jsonl"), *overwrite]
    await to_thread.run_sync(partial(main, arguments))
    assert advice in capsys.readouterr().err


def test_overwrite_needs_a_readable_input(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(SCORES)
    folder = tmp_path
    with pytest.raises(IsADirectoryError):
        resume(folder, out, tmp_path / "errors.jsonl", overwrite=True)
    assert out.read_text() == SCORES


def test_wrong_arguments_delete_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(SCORES)
    with pytest.raises(SystemExit):
        main([str(out), "--out", str(out), "--overwrite"])
    assert "must be three different files" in capsys.readouterr().err
    assert out.read_text() == SCORES


@pytest.mark.parametrize(
    ("out", "errors"),
    [("r.v1", "r.v1.errors.jsonl"), ("r.v2", "r.v2.errors.jsonl"), ("r.jsonl", "r.errors.jsonl")],
)
async def test_each_output_has_its_own_file_of_errors(
    tmp_path: Path, out: str, errors: str
) -> None:
    """Without an engine, a run ends after it has opened its files."""
    (tmp_path / "input.jsonl").write_text('{"context": "One", "candidates": [" two"]}\n')
    arguments = [str(tmp_path / "input.jsonl"), "--out", str(tmp_path / out)]
    call = partial(main, [*arguments, "--engine", "http://127.0.0.1:9"])
    assert await to_thread.run_sync(call) == 1
    assert (tmp_path / errors).exists()


def test_help_names_all_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    statuses = capsys.readouterr().out.partition("exit status: ")[2]
    assert all(f"{status} " in statuses for status in (0, 1, 2, 3, 130))
