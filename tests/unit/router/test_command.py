"""Test ``flashmoa router``; tests/unit/cli/test_serve.py has its numbers and ports."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashmoa import cli
from flashmoa.cli import router


def test_router_command_has_help_and_refuses_bad_urls(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        router.main(["--help"])
    assert "--patience" in capsys.readouterr().out
    assert router.main(["--engine", "nonsense"]) == 1
    assert "nonsense" in capsys.readouterr().err
    assert "router" in cli._USAGE


def test_router_command_names_a_model_config_that_is_not_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text("model_type: llama")
    command = ["--engine", "http://127.0.0.1:9", "--model-config", str(config)]
    assert router.main(command) == 1
    assert f"--model-config {config} is not JSON: Expecting value" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [[], ["--prefill", "a:1"], ["--engine", "a:1", "--prefill", "a:1", "--pd-router", "b:1"]],
)
def test_command_accepts_engines_or_a_pair(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["flashmoa", "router", *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    assert "--prefill and --pd-router" in capsys.readouterr().err
