"""Test what ``flashmoa moa check`` finds on real engines, and reports as missing."""

from pathlib import Path

import anyio
import pytest

from flashmoa.cli.moa import main
from flashmoa.engine.local import LocalEngine

FILE = """
[systems.judged]
layers = [{{models = [{{engine = "{url}", repeat = 3}}]}}, {{models = [{{engine = "{last}"}}]}}]
{more}
"""


def write(folder: Path, url: str, last: str, more: str = "") -> Path:
    path = folder / "moa.toml"
    path.write_text(FILE.format(url=url, last=last, more=more))
    return path


async def test_engines_and_embedders_are_checked(
    engine: LocalEngine,
    plain_engine: LocalEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def check(path: Path) -> tuple[int, str]:
        status = await anyio.to_thread.run_sync(main, ["check", str(path)])
        return status, " ".join(capsys.readouterr().out.split())

    status, shown = await check(write(tmp_path, engine.url, plain_engine.url))
    assert status == 0 and "nothing to fix" in shown
    assert f"{plain_engine.url} is SGLang without the plugin" in shown
    # Nothing listens there, and the engine serves no embeddings.
    more = f'early_exit = {{embedder = "{engine.url}"}}'
    status, shown = await check(write(tmp_path, engine.url, "http://127.0.0.1:9", more))
    assert status == 1 and "2 to fix" in shown
    assert "http://127.0.0.1:9 cannot be reached" in shown and "correct [early_exit]" in shown


def test_a_wrong_file_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "moa.toml"
    path.write_text("layrs = []")
    assert main(["serve", str(path)]) == 1
    assert "the file has no key 'layrs': did you mean 'layers'?" in capsys.readouterr().err
