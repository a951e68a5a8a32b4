"""The page of a run: its data, and that it is a single file. ``integration/page`` opens it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from flashmoa.cli import trace as command
from flashmoa.observe import Event, LinkDeclined
from flashmoa.observe import page as page_module
from flashmoa.observe.page import page, run_data
from flashmoa.observe.summary import NoteKind
from tests.integration.page.runs import HOSTILE, hostile, long_run
from tests.unit.events import answered
from tests.unit.observe.test_trace import RUN, write


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
