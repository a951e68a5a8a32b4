"""An example's team is planned on modelled engines, from the command line."""

import json
from functools import partial
from pathlib import Path

import pytest
from anyio import to_thread
from flashmoa_bench.harness import modelled_gpus

from flashmoa.cli import plan as main
from tests.conftest import ROOT

pytestmark = pytest.mark.nightly


async def test_an_example_is_planned_unlinked_and_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures depend on how busy this machine is, so overruns are tolerated here."""
    monkeypatch.setattr(modelled_gpus, "TOLERATED_SHARE", 1.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    figures, run = tmp_path / "plan.json", tmp_path / "run.html"
    arguments = [
        str(ROOT / "examples" / "chain.py"), "--output-tokens", "8", "--output-tokens",
        "summary=12", "--rounds", "1", "--json", str(figures), "--html", str(run),
    ]  # fmt: skip
    # anyio.run() needs a thread without the session's event loop.
    status = await to_thread.run_sync(partial(main, arguments))
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "modelled h200_sxm (Qwen/Qwen3-32B, TP1)" in printed.out
    plan = json.loads(figures.read_text())
    assert [call["agent"] for call in plan["calls"]] == ["planner", "local", "language", "summary"]
    assert plan["calls"][0]["avoidable"] == 0 < plan["bound_seconds"]
    assert all(call["prompt_tokens"] > 200 for call in plan["calls"])
    assert [engine["agents"] for engine in plan["engines"]] == [
        ["planner", "language"],
        ["local", "summary"],
    ]
    assert all(0 < engine["busy"]["linked"] <= 1 for engine in plan["engines"])
    for page in (run, tmp_path / "run-unlinked.html"):
        assert "modelled h200_sxm" in page.read_text()
