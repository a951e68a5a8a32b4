"""What ``flashmoa moa check`` finds on real engines, and what it says is missing."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from flashmoa.cli.moa import main
from flashmoa.engine.local import LocalEngine
from flashmoa.moa.serve.check import check_models
from flashmoa.moa.serve.config_file import read_file

pytestmark = pytest.mark.anyio

FILE = """
[models.agent]
engine = "{url}"
max_tokens = {tokens}
speed = {{prefill = 1000, decode = 50}}

[systems.judged]
layers = [{{models = [{{use = "agent", repeat = 3}}]}}, {{models = ["{last}"]}}]
early_exit = {{embedder = "{embedder}"}}

[systems.stairs]
kind = "staircase"
layers = [{{models = ["agent"]}}, {{models = ["agent"]}}]

[models.other]
engine = "http://127.0.0.1:9"
"""


def write(folder: Path, url: str, **values: object) -> Path:
    path = folder / "moa.toml"
    defaults = {"last": "agent", "tokens": 20, "embedder": url}
    path.write_text(FILE.format(url=url, **{**defaults, **values}))
    return path


async def findings(path: Path) -> list[tuple[str, str]]:
    found = await check_models(read_file(path))
    return [(finding.level, finding.text) for finding in found]


async def test_what_an_engine_has_is_found(
    engine: LocalEngine, plain_engine: LocalEngine, tmp_path: Path
) -> None:
    found = await findings(write(tmp_path, engine.url))
    assert ("ok", f"{engine.url}: answers agents' requests with log-probabilities") in found
    assert not any("no plugin" in text for _, text in found)
    found = await findings(write(tmp_path, plain_engine.url))
    assert any(level == "note" and "no plugin" in text for level, text in found)


async def test_answers_that_no_early_exit_judges_need_no_log_probabilities(
    engine: LocalEngine, plain_engine: LocalEngine, tmp_path: Path
) -> None:
    """No two answers can leave another one out if there are only two."""
    path = write(tmp_path, engine.url)
    two = f'{{models = [{{use = "agent", engine = "{plain_engine.url}", repeat = 2}}]}}'
    layers = path.read_text().replace("repeat = 3}]}, ", f"repeat = 3}}]}}, {two}, ")
    path.write_text(layers.replace("early_exit", 'topology = "3x2x1"\nearly_exit'))
    texts = [text for _, text in await findings(path)]
    assert f"{engine.url}: answers agents' requests with log-probabilities" in texts
    assert f"{plain_engine.url}: answers agents' requests" in texts


async def test_early_exit_that_leaves_out_nobody_is_refused(
    engine: LocalEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, engine.url)
    path.write_text(path.read_text().replace("repeat = 3", "repeat = 2"))
    for command in (["check"], ["serve", "--dry-run"]):
        assert await anyio.to_thread.run_sync(main, [*command, str(path)]) == 1
        assert "none is ever left out" in capsys.readouterr().err


async def test_what_is_missing_is_named(engine: LocalEngine, tmp_path: Path) -> None:
    # The engine serves no embeddings.
    found = await findings(write(tmp_path, engine.url, last="other"))
    problems = [text for level, text in found if level == "fix"]
    assert len(problems) == 2
    assert "http://127.0.0.1:9 cannot be reached" in problems[0]
    assert problems[1].startswith(f"{engine.url}: ")


async def test_a_context_that_is_too_short_is_noted(engine: LocalEngine, tmp_path: Path) -> None:
    found = await findings(write(tmp_path, engine.url, tokens=20_000))
    assert any(level == "note" and "longest answers in it" in text for level, text in found)


async def test_a_name_that_is_not_served_is_missing(engine: LocalEngine, tmp_path: Path) -> None:
    path = write(tmp_path, engine.url)
    path.write_text(path.read_text().replace("max_tokens", 'model = "gpt"\nmax_tokens'))
    problems = [text for level, text in await findings(path) if level == "fix"]
    assert "and not 'gpt'" in problems[0]


async def test_status_of_the_command_says_whether_something_is_missing(
    engine: LocalEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, engine.url)
    assert await anyio.to_thread.run_sync(main, ["check", str(path)]) == 1
    text = path.read_text().replace(f'early_exit = {{embedder = "{engine.url}"}}', "")
    path.write_text(text)
    assert await anyio.to_thread.run_sync(main, ["check", str(path)]) == 0
    assert "nothing to fix" in capsys.readouterr().out


def test_a_dry_run_estimates_every_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "http://127.0.0.1:9")
    assert main(["serve", "--dry-run", "--question-tokens", "100", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "judged: a question of 100 tokens" in shown and "stairs: a question of" in shown
    # One agent after another decodes 20 tokens at 50 a second.
    assert " 1.1 " in shown.split("stairs")[1].splitlines()[-2]


def test_a_wrong_file_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "moa.toml"
    path.write_text("layrs = []")
    assert main(["serve", str(path)]) == 1
    assert "the file has no key 'layrs': did you mean 'layers'?" in capsys.readouterr().err
