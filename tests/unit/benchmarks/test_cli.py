"""Test ``flashmoa bench``: its list, its help, and its message without the package."""

from collections.abc import Callable, Sequence

import pytest
from flashmoa_bench.cli import BENCHMARKS

from flashmoa import cli
from flashmoa.cli import bench, plan


def test_the_help_of_flashmoa_mentions_bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["flashmoa", "--help"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "flashmoa bench NAME" in printed and "flashmoa plan FILE" in printed


def test_an_unknown_benchmark_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["speed"]) == 2
    message = capsys.readouterr().err
    assert "there is no benchmark 'speed'" in message
    assert all(f"  {name.replace('_', '-')} " in message for name in BENCHMARKS)


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_every_benchmark_has_a_help_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: flashmoa bench {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("handoff --resume", "--resume needs the --json FILE"),
        ("handoff --tps 0", "must be above 0, not 0"),
        ("handoff --device-slowdown 0.5", "must be at least 1, not 0.5"),
        ("chunk --context 64", "--chunks cannot be larger than --context"),
        ("shared_engine --rows 8:1/2", "'8:1/2' is not COUNT:PROMPT/ANSWER:PROMPT/ANSWER"),
        ("moa_latency --ways tree shrub", "invalid choice: 'shrub'"),
        ("staircases --proposers 1 3", "a debate needs at least two --proposers"),
        ("moa_accuracy test.jsonl", "this needs real models"),
        ("moa_accuracy test.jsonl --model a b c d", "this needs real models"),
        ("moa_accuracy absent.jsonl --small-url http://s", "No such file or directory: 'absent"),
        ("moa_judge absent.jsonl --small-url http://s", "this needs a judge: give --judge-url"),
        ("moa_judge x --small-url s --judge-url j --baseline full", "exits early, which needs"),
        ("moa_judge absent.jsonl --small-url s --judge-url j", "No such file or directory"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    command: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench(command.split())
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(("name", "run"), [("bench", bench), ("plan", plan)])
def test_commands_without_their_package_say_so(
    name: str,
    run: Callable[[Sequence[str]], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("flashmoa.cli.find_spec", lambda _name: None)
    assert run(["chunk"]) == 1
    assert capsys.readouterr().err == (
        f"flashmoa {name} needs the package flashmoa-bench: pip install ./benchmarks in a clone of "
        "FlashMoA's repository, else pip install flashmoa-bench\n"
    )
