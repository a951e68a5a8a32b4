"""Test what ``flashmoa plan`` refuses before it starts engines."""

from urllib.request import proxy_bypass

import pytest
from flashmoa_bench.plan.command import main
from pytest import CaptureFixture, MonkeyPatch

from tests.conftest import ROOT

CHAIN = str(ROOT / "examples" / "chain.py")
SHORT = ["--output-tokens", "8"]


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
        ([CHAIN, "--rounds", "0"], "argument --rounds: must be above 0"),
        ([CHAIN, "--output-tokens", "planner=0"], "argument --output-tokens: must be above 0"),
        ([CHAIN, "--tokenizer", "missing"], "argument --tokenizer: missing is not a folder"),
        ([CHAIN, "--slowdown", "0.5"], "argument --slowdown: must be at least 1"),
    ],
)
def test_an_impossible_plan_is_refused(
    arguments: list[str], problem: str, capsys: CaptureFixture[str]
) -> None:
    if "argument" in problem:
        with pytest.raises(SystemExit):
            main(arguments)
    else:
        assert main(arguments) == 1
    assert problem in capsys.readouterr().err


def test_engines_are_asked_without_a_proxy(monkeypatch: MonkeyPatch) -> None:
    for name, value in (
        ("HTTP_PROXY", "http://proxy:3128"),
        ("NO_PROXY", "internal"),
        ("no_proxy", ""),
    ):
        monkeypatch.setenv(name, value)
    main(["missing.py"])
    hosts = ("127.0.0.1", "internal", "elsewhere")
    assert [bool(proxy_bypass(host)) for host in hosts] == [True, True, False]
