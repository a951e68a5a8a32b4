"""Test the command lines of the benchmarks of mixtures."""

from __future__ import annotations

from pathlib import Path

import pytest
from flashmoa_bench.moa import latency, staircases


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--resume"], "--resume needs the --json FILE"),
        (["--computed"], "--computed needs the --device"),
        (["--ways", "tree", "shrub"], "there is no way 'shrub'; there are all-to-all, tree"),
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
