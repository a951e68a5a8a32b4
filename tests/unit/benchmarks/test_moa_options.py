"""Test the command lines of the benchmarks of mixtures."""

from __future__ import annotations

from pathlib import Path

import pytest
from flashmoa_bench.moa import benchmark, latency, staircases
from flashmoa_bench.moa.options import engine_urls


def test_engines_are_given_by_size_or_one_for_all() -> None:
    one = engine_urls(["http://a:1"])
    assert one == dict.fromkeys(("small", "medium", "large"), "http://a:1")
    by_size = engine_urls(["large=http://c:3", "small=http://a:1", "medium=http://b:2"])
    assert by_size["medium"] == "http://b:2" and len(by_size) == 3
    with pytest.raises(ValueError, match="give small=URL medium=URL large=URL, or one URL"):
        engine_urls(["small=http://a:1", "large=http://c:3"])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--accuracy", "gsm8k"], "needs its --file"),
        (["--accuracy", "gsm8k", "--file", "x"], "needs real models: give --engines"),
        (["--accuracy", "gsm8k", "--file", "x", "--engines", "small=x"], "or one URL for all"),
    ],
)
def test_accuracy_is_that_of_real_models(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(options)
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--resume"], "--resume needs the --json FILE"),
        (["--computed"], "--computed needs the --device"),
        (["--ways", "tree", "shrub"], "there is no way 'shrub'; there are all-to-all, tree"),
        (["--ways", "width 3"], "there is no way 'width 3'"),
    ],
)
def test_latency_refuses_what_it_cannot_measure(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        latency.main(options)
    assert problem in capsys.readouterr().err


def test_a_debate_of_one_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        staircases.main(["--proposers", "1", "3", "--json", str(tmp_path / "x.json")])
    assert "a debate needs at least two --proposers" in capsys.readouterr().err
