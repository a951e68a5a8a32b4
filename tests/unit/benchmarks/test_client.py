"""What the benchmark of OpenAI's client measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flashmoa_bench.linking.client import main


def test_the_cost_of_each_kind_of_answer_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "client.json"
    assert main(["--tokens", "5", "50", "--repeats", "2", "--json", str(file)]) == 0
    costs = json.loads(file.read_text())["results"]["costs"]
    assert [cost["tokens"] for cost in costs] == [5, 50]
    assert all(cost[kind] > 0 for cost in costs for kind in ("whole", "streamed", "logprobs"))
    assert "CPU time for each token" in capsys.readouterr().out
