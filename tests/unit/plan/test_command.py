"""Test what ``flashmoa plan`` refuses before it starts engines."""

from __future__ import annotations

from functools import partial
from urllib.request import proxy_bypass

import pytest
from anyio import to_thread
from flashmoa_bench.plan.command import main

from tests.conftest import ROOT

CHAIN = str(ROOT / "examples" / "chain.py")
SHORT = ["--output-tokens", "8"]


async def run(*arguments: str) -> int:
    # anyio.run() needs a thread without the session's event loop.
    return await to_thread.run_sync(partial(main, arguments))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["missing.py"], "missing.py is not a file"),
        ([CHAIN], "the client of planner has no max_tokens"),
        ([CHAIN, *SHORT, "--team", "nothing"], "has no AgentChat team named nothing"),
        ([CHAIN, *SHORT, "--gpu", "h900"], "No data sheet of a GPU 'h900'. Known are: a100"),
        ([CHAIN, *SHORT, "--model", "Qwen/Qwen9"], "No config.json of the model 'Qwen/Qwen9'"),
        ([CHAIN, *SHORT, "--model", "Qwen/Qwen3-235B-A22B"], "give a larger --tp or another GPU"),
        ([CHAIN, *SHORT, "--tp", "1", "--tp", "2", "--tp", "4"], "--tp is given 3 times, for 2"),
        ([CHAIN, *SHORT, "--include", "nobody"], "--include names 'nobody'"),
    ],
)
async def test_an_impossible_plan_is_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run(*arguments) == 1
    assert problem in capsys.readouterr().err


async def test_engines_are_not_asked_through_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "internal")
    monkeypatch.setenv("no_proxy", "")
    await run("missing.py")
    assert proxy_bypass("127.0.0.1")
    assert proxy_bypass("internal")
    assert not proxy_bypass("elsewhere")


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--rounds", "0", "must be above 0"),
        ("--output-tokens", "planner=0", "must be above 0"),
        ("--tokenizer", "missing", "missing is not a folder"),
        ("--slowdown", "0.5", "must be at least 1"),
    ],
)
def test_values_that_mean_nothing_are_refused(
    option: str, value: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([CHAIN, option, value])
    error = capsys.readouterr().err
    assert f"argument {option}" in error
    assert problem in error
