"""Test how traces are written, read and shown: in the terminal, and as a page."""

import gc
import io
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.cells import cell_len
from rich.console import Console

from flashmoa import observe
from flashmoa.cli import trace as command
from flashmoa.cli.trace import show
from flashmoa.engine import PromptUsage, Span, StreamUse
from flashmoa.observe import Event, LinkDeclined
from flashmoa.observe import page as page_module
from flashmoa.observe.calls import CallReporter, calls
from flashmoa.observe.events import ignore
from flashmoa.observe.page import page, run_data
from flashmoa.observe.summary import NoteKind
from flashmoa.observe.timeline import LEGEND, draw, lanes
from flashmoa.observe.trace import Trace, TraceError, add_trace, end_trace, read
from tests.integration.page.runs import HOSTILE, hostile, long_run
from tests.unit.events import answered, closed, opened

B = {"agent": "B", "engine": "http://b"}
USE = StreamUse(id="s", status="hit", prefills=[Span(start=1.0, end=6.0, tokens=500)])
USAGE = PromptUsage(prompt_tokens=510, completion_tokens=3, prompt_stream=USE)
EVENTS: list[observe.Event] = [
    *answered("A", 0.0, 2.0, 8.0, engine="http://a", id_="a", text="x"),
    *answered("B", 8.0, 8.5, 10.0, engine="http://b", id_="b", text="y", usage=USAGE),
]


def test_prefills_are_drawn_under_decodes() -> None:
    rows = draw(lanes(EVENTS), columns=44).splitlines()
    assert rows[0].startswith("A |") and rows[1].startswith("B |")
    assert all(len(row) <= 44 for row in rows[:3])
    ahead = [i for i, mark in enumerate(rows[1]) if mark == "░"]
    decode = [i for i, mark in enumerate(rows[0]) if mark == "█"]
    assert set(ahead[5:]) <= set(decode) | set(range(12))
    assert min(ahead) < min(decode) < max(ahead) < max(decode)
    assert "10.00 s" in rows[2]


@pytest.mark.parametrize(
    "name", ["an agent with a long name " * 9, "旅行計画を書くエージェント" * 9]
)
def test_long_and_wide_names_are_shortened(name: str) -> None:
    events = [replace(event, agent=name) if event.agent == "A" else event for event in EVENTS]
    first, second, *_ = draw(lanes(events), columns=60).splitlines()
    assert cell_len(first) == cell_len(second) <= 60
    assert cell_len(first.partition("|")[0]) == cell_len(second.partition("|")[0]) <= 21
    assert first.lstrip().startswith(name[:5]) and "…" in first


def test_lines_of_the_timeline_are_not_wrapped() -> None:
    out = io.StringIO()
    events = [replace(event, agent="the planner of trips") for event in EVENTS]
    show(events, Console(file=out, width=40, highlight=False))
    lines = out.getvalue().splitlines()
    assert next(line for line in lines if "█" in line and "|" in line).endswith("|")
    assert any(LEGEND in line for line in lines)


def test_an_agent_on_two_engines_has_two_lanes() -> None:
    moved = [replace(event, engine="http://c", call_id="c") for event in EVENTS[3:]]  # type: ignore[call-arg]
    assert len(lanes([*EVENTS, *moved])) == 3


def test_unfinished_call_has_no_bar() -> None:
    assert lanes(EVENTS[:2])[0].bars == []
    assert draw(lanes(EVENTS[:1])) == "(nothing happened)"


LINK: list[observe.Event] = [
    opened(at=0.5, engine="http://b"),
    observe.LinkAdvanced(**B, at=3.0, stream_id="s", received_tokens=400, prefilled_tokens=300),
    observe.UpstreamFailed(**B, at=4.0, upstream="A", failure="stall", action="finalize"),
    closed("used", 8.0, engine="http://b"),
]
RUN = sorted([*EVENTS, *LINK], key=lambda event: event.at)


def write(path: Path, events: Iterable[observe.Event], *, prompts: bool = False) -> Path:
    trace = Trace(path, prompts=prompts)
    for event in events:
        trace(event)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    for events in (LINK, LINK[:1], RUN):  # Each replaces the trace before.
        file = write(tmp_path / "run.jsonl", events)
    return file


def test_reading_returns_what_was_written(file: Path) -> None:
    assert read(file) == RUN
    # A program was killed while it wrote the last line.
    whole = file.read_text()
    file.write_text(whole[:-20])
    assert read(file) == RUN[:-1]


PROMPTS: list[observe.Event] = [
    observe.PromptSent(
        agent="A", engine="http://a", at=1.0, call_id="a",
        messages=[{"role": "user", "content": "Köln?"}],
        tools=[{"type": "function", "function": {"name": "look"}}],
        settings={"enable_thinking": False, "cache_salt": "s"},
    )
]  # fmt: skip


def test_prompts_are_written_on_request_only(tmp_path: Path) -> None:
    for prompts, expected in ((False, RUN), (True, [*PROMPTS, *RUN])):
        file = write(tmp_path / "run.jsonl", [*PROMPTS, *RUN], prompts=prompts)
        assert read(file) == expected
    # Printing the events does not show the prompts.
    assert "Köln" not in str(PROMPTS[0])


def test_links_at_the_same_time_write_one_trace(tmp_path: Path) -> None:
    """Each says for itself whether its prompts may be written."""
    file, [prompt, *_] = tmp_path / "run.jsonl", PROMPTS
    file.write_text('{"event"')  # Of an earlier process, which was killed.
    first = add_trace(ignore, file, prompts=False)
    first(LINK[0])
    second = add_trace(ignore, tmp_path / "." / "run.jsonl", prompts=True)
    for listener, event in ((first, prompt), (second, prompt), (second, LINK[1]), (first, LINK[2])):
        listener(event)
    assert read(file) == [LINK[0], prompt, LINK[1], LINK[2]]


def test_a_trace_is_replaced_after_all_have_ended(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    first, second = [add_trace(ignore, file, prompts=False) for _ in range(2)]
    first(LINK[0])
    end_trace(first)
    third = add_trace(ignore, file, prompts=False)
    assert read(file) == [LINK[0]]
    for each in (second, third, third, ignore):  # Repeating this is harmless.
        end_trace(each)
    listeners = [add_trace(ignore, file, prompts=False)]
    assert read(file) == []
    listeners[0](LINK[0])
    listeners.clear()  # A team that is dropped without being closed writes no more.
    gc.collect()
    add_trace(ignore, file, prompts=False)
    assert read(file) == []


def test_odd_tools_do_not_end_a_trace(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run.jsonl", prompts=True)
    reporter = CallReporter(trace, agent="A", engine="http://a", model="m")
    reporter.started(None, "")
    reporter.prompt_sent({"messages": [{"role": "user"}], "tools": [Path("tool")]})
    (call,) = calls(read(tmp_path / "run.jsonl"))
    assert call.prompt is not None and call.prompt.tools == ["tool"]


def test_a_prompt_has_its_fields_and_visible_tools() -> None:
    events: list[Any] = []
    reporter = CallReporter(events.append, agent="A", engine="http://a", model="m")
    body = {"messages": [], "tools": [{"function": {"name": "walk"}}], "temperature": 0}
    template = {"chat_template_kwargs": {"enable_thinking": False}}
    reporter.prompt_sent({**body, **template, "cache_salt": "s", "reasoning_effort": "low"})
    reporter.prompt_sent({**body, "tool_choice": "none"})
    settings = {"enable_thinking": False, "reasoning_effort": "low", "cache_salt": "s"}
    sent = [(event.tools, event.settings) for event in events]
    assert sent == [(body["tools"], settings), ([], {"tool_choice": "none"})]


def test_only_the_costliest_breaks_are_shown(tmp_path: Path, capsys: Any) -> None:
    trace = Trace(tmp_path / "run.jsonl", prompts=True)
    for number in range(24):
        agent = f"agent-{number % 12:02}"
        report = CallReporter(trace, agent=agent, engine="http://e", model=agent)
        report.started(None, "")
        text = {"role": "user", "content": f"{number}. Write. [bold]" + "A plan. " * 99}
        report.prompt_sent({"messages": [text]})
        report.finished("", PromptUsage(prompt_tokens=100 + number, completion_tokens=1), "stop")
    assert command.main([str(tmp_path / "run.jsonl")]) == 0
    shown = capsys.readouterr().out
    assert "agent-11, call 2" in shown and "agent-02, call 2" in shown
    assert "agent-01, call 2" not in shown and "... and 2 more" in shown
    assert "[bold]" in shown
    file = write(tmp_path / "run.jsonl", [*RUN, *PROMPTS], prompts=True)
    assert command.main([str(file)]) == 0
    assert "Prefixes: no prompt had 32 tokens or more computed again" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    ["no json", "[]", "1", "{}", '{"event": "Unheard"}', '{"event": "FirstToken", "at": "x"}'],
)
def test_a_file_that_is_no_trace_is_not_read(file: Path, line: str, capsys: Any) -> None:
    file.write_text(f"{line}\n{file.read_text()}")
    with pytest.raises(TraceError, match=r"is not a trace, .*; its line 1 is not an event"):
        read(file)
    for name, problem in (file, "line 1 is not an event"), (f"{file}-missing", "does not exist"):
        assert command.main([str(name)]) == 1
        assert problem in capsys.readouterr().err


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize(
    "text", ["print('Hello!')", '{"accuracy": 0.9', "[1]", '{"event": "click"}', "12"]
)
def test_other_files_are_not_overwritten(tmp_path: Path, text: str, end: str) -> None:
    other = tmp_path / "results.json"
    other.write_text(text + end)
    with pytest.raises(ValueError, match="is not a trace; give another name"):
        Trace(other)
    assert other.read_text() == text + end


def test_a_trace_stays_where_it_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace, elsewhere = Trace("trace.jsonl"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    for folder in (tmp_path, elsewhere):
        monkeypatch.chdir(folder)
        trace(EVENTS[0])
    assert read(tmp_path / "trace.jsonl") == [EVENTS[0]] * 2
    assert not [*elsewhere.iterdir()]


def test_only_the_first_line_of_a_trace_is_read(file: Path) -> None:
    """A long trace would hold up the event loop."""
    file.write_text(f"{file.read_text()}no event\n")
    Trace(file)
    assert read(file) == []


def test_command_shows_timeline_calls_and_links(file: Path, capsys: Any) -> None:
    assert command.main([str(file)]) == 0
    shown = capsys.readouterr().out
    assert "A |" in shown and "█" in shown and "░" in shown
    assert "500 ms" in shown and "hit" in shown
    assert "links, by why they ended: 1 used" in shown
    assert "link(team, trace=FILE, trace_prompts=True) records them" in " ".join(shown.split())
    file.write_text("")
    assert command.main([str(file)]) == 0
    assert "No call has finished" in capsys.readouterr().out


@pytest.mark.parametrize("run", [RUN, []])
def test_command_says_why_calls_failed(tmp_path: Path, capsys: Any, run: list[Any]) -> None:
    """Also if no call has finished, and apart from many notes of other kinds."""
    declined = [observe.LinkDeclined(**B, at=11.0 + n, reason=f"no room {n}") for n in range(12)]
    who, error = {**B, "call_id": "last"}, "EngineUnreachable('http://b [refused]')"
    last = [observe.CallStarted(**who, at=24.0), observe.CallFailed(**who, at=25.0, error=error)]
    assert command.main([str(write(tmp_path / "run.jsonl", [*run, *declined, *last]))]) == 0
    shown = capsys.readouterr().out
    assert f"B: the call failed: {error}\n" in shown
    assert shown.count("... and 2 more; a trace's page shows all") == 1


def embedded(document: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="run">(.*?)</script>', document)
    return json.loads(found)


def test_run_data_has_lanes_calls_and_notes() -> None:
    data = run_data(RUN)
    lanes = [(lane["agent"], lane["engine"]) for lane in data["lanes"]]
    assert lanes == [("A", "http://a"), ("B", "http://b")]
    first, second = data["calls"]
    assert (first["start"], first["token"], first["end"], first["spans"]) == (0, 2, 8, [])
    assert (second["spans"], second["link"]) == ([[1, 6, 500]], "hit")
    assert second["overlap"]["ahead"] == 5
    assert [note["kind"] for note in data["notes"]] == ["upstream failed"]
    assert data["seconds"] == 10 and data["summary"]["end_to_end"] == 10
    assert data["links"] == {"used": 1}


def test_every_kind_of_note_has_a_badge() -> None:
    script = (Path(page_module.__file__).parent / "chart.js").read_text()
    badges = script.partition("const BADGE = {")[2].partition("};")[0]
    assert set(re.findall('"([a-z ]+)": "', badges)) == set(get_args(NoteKind))


def test_concurrent_calls_get_separate_rows() -> None:
    events: list[Event] = []
    for name, start, end in (("1", 0, 5), ("2", 1, 3), ("3", 4, 6), ("4", 6, 7)):
        events += answered("A", start, None, end, id_=name)
    data = run_data(events)
    assert [call["row"] for call in data["calls"]] == [0, 1, 1, 0]
    assert data["lanes"][0]["rows"] == 2


def test_an_agent_without_a_call_gets_a_lane() -> None:
    declined = LinkDeclined(agent="C", engine="", at=3.0, reason="why")
    data = run_data([*RUN, declined])
    assert data["lanes"][-1]["agent"] == "C" and data["notes"][0]["lane"] == 2
    assert run_data([])["lanes"] == []


def test_page_is_one_file_that_loads_nothing() -> None:
    document = page(long_run(3), "run.jsonl")
    assert "default-src 'none'" in document
    assert not re.search(r"<link|@import|\ssrc=|href=|url\((?!#)|fetch\(|XMLHttp", document)
    assert document.count("<script") == 2


def test_texts_cannot_break_out_of_their_element() -> None:
    document = page(hostile(), HOSTILE)
    assert embedded(document)["lanes"][0]["agent"] == HOSTILE
    assert "<img" not in document and "<!--" not in document
    assert document.count("</script>") == 2


def test_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, file = write(tmp_path / "run.json", RUN), tmp_path / "run.html"
    assert command.main([str(trace), "--html", str(file)]) == 0
    shown = capsys.readouterr().out
    assert f"For a browser: {file}" in shown
    assert "1 of 2 calls linked" in " ".join(shown.split())
    assert embedded(file.read_text()) == json.loads(json.dumps(run_data(RUN)))
    with pytest.raises(SystemExit):
        command.main([str(trace), "--html", str(trace)])
    assert "is the trace itself" in capsys.readouterr().err
