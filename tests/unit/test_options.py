"""The plugin's own server arguments."""

from __future__ import annotations

import argparse

import pytest
from flashmoa_sglang.options import Options, add_arguments


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    for name in ("SCHEDULE", "INTRA_TURN", "STREAM_SHARE"):
        # Set first, so that what a test's parser sets is undone.
        monkeypatch.setenv(f"FLASHMOA_{name}", "")
        monkeypatch.delenv(f"FLASHMOA_{name}")
    made = argparse.ArgumentParser()
    add_arguments(None, made)
    return made


def test_defaults(parser: argparse.ArgumentParser) -> None:
    parser.parse_args([])
    assert Options.from_environment() == Options()


def test_arguments_reach_every_process_through_the_environment(
    parser: argparse.ArgumentParser,
) -> None:
    parser.parse_args(["--flashmoa-schedule", "sjf", "--flashmoa-stream-share", "0.5"])
    assert Options.from_environment() == Options(schedule="sjf", stream_share=0.5)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--flashmoa-schedule", "fifo"),
        ("--flashmoa-intra-turn", "on"),
        ("--flashmoa-stream-share", "0"),
        ("--flashmoa-stream-share", "much"),
    ],
)
def test_bad_values_are_refused_by_name(
    parser: argparse.ArgumentParser,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    value: str,
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args([flag, value])
    assert flag in capsys.readouterr().err
