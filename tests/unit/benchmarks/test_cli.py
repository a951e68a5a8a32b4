"""Test ``flashmoa bench``: its list, its help, and its message without the package."""

from __future__ import annotations

import pytest
from flashmoa_bench.cli import BENCHMARKS

from flashmoa import cli
from flashmoa.cli import bench


def test_the_help_of_flashmoa_mentions_bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["flashmoa", "--help"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    assert "flashmoa bench NAME" in capsys.readouterr().out


def test_an_unknown_benchmark_is_reported_with_the_list_of_benchmarks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench.main(["speed"]) == 2
    message = capsys.readouterr().err
    assert "there is no benchmark 'speed'" in message
    assert all(name in message for name in BENCHMARKS)


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_every_benchmark_has_a_help_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: flashmoa bench {name}" in capsys.readouterr().out


def test_bench_without_its_package_reports_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda _name: None)
    assert bench.main(["chunk"]) == 1
    assert capsys.readouterr().err == (
        "flashmoa bench needs the package flashmoa-bench: pip install ./benchmarks\n"
    )
