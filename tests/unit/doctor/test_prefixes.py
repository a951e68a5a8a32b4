"""``flashmoa doctor --trace`` without an engine; with one, see ``tests/integration/doctor``."""

from __future__ import annotations

import json
from pathlib import Path

import anyio.to_thread
import pytest

from flashmoa.cli import doctor
from flashmoa.cli import trace as trace_command
from flashmoa.doctor import check_prefixes
from flashmoa.engine import PromptUsage
from flashmoa.observe.calls import CallReporter
from flashmoa.observe.trace import Trace

pytestmark = pytest.mark.anyio


def record(file: Path, *systems: str, prompts: bool = True) -> Path:
    """Write the trace of an agent whose system message changes from call to call."""
    trace = Trace(file, prompts=prompts)
    for system in systems:
        report = CallReporter(trace, agent="writer", engine="http://127.0.0.1:9", model="m")
        report.started(None, late=False)
        task = {"role": "user", "content": "Write a long plan. " * 100}
        report.prompt_sent({"messages": [{"role": "system", "content": system}, task]})
        usage = PromptUsage(prompt_tokens=500, completion_tokens=5, cached_tokens=8)
        report.finished("", usage, "stop")
    return file


async def test_break_is_a_note_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = record(tmp_path / "run.jsonl", "It is 9:59.", "It is 10:00.")
    (finding,) = await check_prefixes(file)
    assert finding.level == "note" and "the system message differs" in finding.text
    assert finding.remedy == "put what differs at the end of the last message"
    arguments = ["--trace", str(file)]
    assert await anyio.to_thread.run_sync(doctor.main, arguments) == 0
    report = capsys.readouterr().out
    # The lines of a finding are below each other.
    assert "\nnote  prefix" not in report.partition("\n")[2]
    assert "\n                cost    492 of 500 prompt tokens computed" in report
    assert await anyio.to_thread.run_sync(doctor.main, [*arguments, "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["text"] == finding.text


async def test_prompts_that_share_their_prefixes_are_ok(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = record(tmp_path / "run.jsonl", "Be brief.", "Be brief.")
    (finding,) = await check_prefixes(file)
    assert (finding.level, finding.about) == ("ok", "prefix")
    assert trace_command.main([str(file)]) == 0
    assert "Prefixes: no prompt had 32 tokens or more computed again" in capsys.readouterr().out


async def test_trace_without_prompts_says_how_to_record_them(tmp_path: Path) -> None:
    file = record(tmp_path / "run.jsonl", "Be brief.", prompts=False)
    (finding,) = await check_prefixes(file)
    assert finding.level == "fix" and finding.text.endswith("has no prompts")
    assert finding.remedy == "link(team, trace=FILE, trace_prompts=True)"
    (finding,) = await check_prefixes(tmp_path / "missing.jsonl")
    assert finding.level == "fix" and "does not exist" in finding.text


@pytest.mark.parametrize(
    ("url", "text"),
    [("http://127.0.0.1:9", "cannot be reached"), ("127.0.0.1:9", "is not an engine's URL")],
)
async def test_without_the_engine_prompts_are_compared_as_sent(
    tmp_path: Path, url: str, text: str
) -> None:
    file = record(tmp_path / "run.jsonl", "Turn 1.", "Turn 2.")
    problem, finding = await check_prefixes(file, url)
    assert problem.level == "fix" and text in problem.text
    assert "of its tools and messages" in finding.text


async def test_only_the_costliest_breaks_are_shown_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = Trace(tmp_path / "run.jsonl", prompts=True)
    for number in range(24):
        agent = f"agent-{number % 12:02}"
        report = CallReporter(trace, agent=agent, engine="http://e", model=agent)
        report.started(None, late=False)
        text = {"role": "user", "content": f"{number}. Write. [bold]" + "A plan. " * 99}
        report.prompt_sent({"messages": [text]})
        tokens = 100 + number
        usage = PromptUsage(prompt_tokens=tokens, completion_tokens=1, cached_tokens=0)
        report.finished("", usage, "stop")
    assert trace_command.main([str(tmp_path / "run.jsonl")]) == 0
    shown = capsys.readouterr().out
    assert "agent-11, call 2" in shown and "agent-02, call 2" in shown
    assert "agent-01, call 2" not in shown and "... and 2 more" in shown
    assert "[bold]" in shown
