"""Test what a program's runs leave in a folder for the next process."""

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from flashmoa.link import remembered_runs
from flashmoa.link.learned_runs import NOT_REMEMBERED, LearnedRun, Program, RecordedRequest
from flashmoa.link.prompt import NotForecastable
from flashmoa.observe import Event, LinkOpened
from flashmoa.openai import AsyncOpenAI, agent, run
from flashmoa.openai.sent_requests import headers_now
from tests.unit.openai.fake_server import URL, FakeServer, ask
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("programs")
KEY = "sk-private"
# A call of a tool that no run can have had.
UNUSABLE = json.dumps(
    {
        "fields": [{}],
        "calls": [
            {
                "call": {
                    "key": "a", "name": "a", "after": 0, "tool_answer": {"role": "assistant"},
                    "request": {"url": "", "model": "", "messages": []},
                },
                "messages": [],
                "fields": 0,
            }
        ],
    }
)  # fmt: skip


async def play(
    server: FakeServer, folder: Path, topic: str = "Oslo", *, linked: bool = False
) -> list[Event]:
    """Let a critic read a writer; return the events.

    Args: linked: whether to wait until the critic is linked.
    """
    events: list[Event] = []
    async with (
        server.client(api_key=KEY) as client,
        run("trip", remember=folder, listener=events.append),
    ):
        with agent("writer"):
            text = (await ask(client, f"Plan {topic}.")).message.content
        if linked:
            await until(lambda: bool(opened(events)))
        with agent("critic"):
            await ask(client, f"Check {text}")
    return events


def opened(events: list[Event]) -> set[str]:
    return {event.agent for event in events if isinstance(event, LinkOpened)}


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_the_next_process_is_linked(
    server: FakeServer, programs: dict[str, Program], tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    assert opened(await play(server, folder)) == set()
    (path,) = files(folder)
    assert path.stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
    assert KEY not in path.read_text() and "Plan Oslo." in path.read_text()
    programs.clear()  # As in another process.
    assert opened(await play(server, folder, "Rome", linked=True)) == {"critic"}
    streams = [headers for where, _, headers in server.requests if where == "/prompt_streams"]
    assert streams and all(each["authorization"] == f"Bearer {KEY}" for each in streams)
    assert len(files(folder)) == 1 and "Plan Rome." in path.read_text()


async def test_a_run_that_fails_teaches_nothing(server: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        async with server.client() as client, run("trip", remember=tmp_path):
            await ask(client, "Go.")
            raise KeyError
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version": 2}', '{"version": 1, "calls": 3}', UNUSABLE]
)
async def test_a_file_that_cannot_be_read_is_replaced(
    server: FakeServer,
    programs: dict[str, Program],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    content: str,
) -> None:
    await play(server, tmp_path)
    (path,) = files(tmp_path)
    path.write_text(content)
    programs.clear()
    assert opened(await play(server, tmp_path)) == set()
    (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert str(path) in warning.getMessage() and "replaced" in warning.getMessage()
    programs.clear()
    assert opened(await play(server, tmp_path, linked=True)) == {"critic"}


async def test_a_folder_that_is_a_file_is_refused(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        await play(server, tmp_path / "file")


async def test_a_full_disk_changes_no_run(
    server: FakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(remembered_runs.os, "replace", fail)
    await play(server, tmp_path)
    assert "No space left" in caplog.text and files(tmp_path) == []


def test_a_run_that_json_cannot_have_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program()
    learned = LearnedRun(program)
    request = RecordedRequest(URL, "m", [{"role": "user", "content": "Go."}])
    learned.complete(learned.begin("writer", request), "half \ud83d")
    learned.finish()
    remembered_runs.save(tmp_path, "half", program)
    assert "not remembered" in caplog.text and files(tmp_path) == []
    for name in ("/tmp", "a/../..", "x" * 5000, "\ud83d", ""):
        remembered_runs.save(tmp_path, name, Program())
    assert len(files(tmp_path)) == 4


def test_no_key_of_an_mcp_server_is_kept(tmp_path: Path) -> None:
    program = Program()
    learned = LearnedRun(program)
    tool = {"type": "mcp", "server_label": "s", "authorization": KEY, "headers": {"k": KEY}}
    plain = {"type": "function", "name": "look"}
    request = RecordedRequest(URL, "m", [], {"tools": [tool, plain]}, is_response=True)
    learned.complete(learned.begin("writer", request), "Yes.")
    learned.finish()
    remembered_runs.save(tmp_path, "trip", program)
    (path,) = files(tmp_path)
    assert KEY not in path.read_text()
    restored = Program()
    remembered_runs.load(tmp_path, "trip", restored)
    (call,) = restored.recorded.values()
    assert call.request.fields["tools"] == [{"type": "mcp", "server_label": "s"}, plain]


def test_files_and_their_sizes_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remembered_runs, "MAX_PROGRAMS", 2)
    (tmp_path / "other").write_text("")
    for name in ("../a", "b", "c/d"):
        remembered_runs.save(tmp_path, name, Program())
    names = sorted(path.name.rpartition("-")[0] for path in tmp_path.glob("*.flashmoa-run.json"))
    assert (tmp_path / "other").exists() and len(names) == 2
    monkeypatch.setattr(remembered_runs, "MAX_RECORDED_BYTES", 10)
    remembered_runs.save(tmp_path, "large", Program())
    assert "not remembered" in caplog.text and not list(tmp_path.glob("large*"))


def without_headers(program: Program) -> list[dict[str, Any]]:
    calls = program.recorded.values()
    return [asdict(replace(call, request=replace(call.request, headers={}))) for call in calls]


def test_all_that_a_run_teaches_is_kept(tmp_path: Path) -> None:
    program = Program()
    tools = {"tools": [{"type": "function", "function": {"name": "look"}}]}
    first = RecordedRequest(
        URL, "m", [{"role": "user", "content": "é"}], tools, {"cache_salt": "s"}, {"a": "b"}
    )
    answer: dict[str, Any] = {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": "{}"}}],
    }
    result = {"role": "tool", "tool_call_id": "c1", "content": "Rain."}
    for _ in range(2):
        learned = LearnedRun(program)
        learned.complete(learned.begin("writer", first), tool_answer=answer)
        second = RecordedRequest(URL, "m", [*first.messages, answer, result], tools)
        learned.complete(learned.begin("writer", second), "It rains.")
        program.output_lengths.add("writer", 7)
        learned.finish()
    remembered_runs.save(tmp_path, "trip", program)
    restored = Program()
    remembered_runs.load(tmp_path, "trip", restored)
    assert list(restored.recorded) == list(program.recorded)
    assert without_headers(restored) == without_headers(program)
    assert restored.output_lengths.expect("writer") == 7
    assert restored.sent_back == program.sent_back


async def test_headers_are_of_a_request_to_the_server_or_of_its_clients() -> None:
    url = "http://remembered:1"  # Clients of other tests may still be open.
    before = RecordedRequest(url, "m", [], headers=NOT_REMEMBERED)

    def sent(key: str) -> tuple[RecordedRequest, RecordedRequest]:
        return before, RecordedRequest(url, "m", [], headers={"authorization": key, "x-a": "b"})

    assert headers_now(before, [sent("one")]) == {"authorization": "one", "x-a": "b"}
    for unknown in ([], [sent("one"), sent("two")]):
        with pytest.raises(NotForecastable, match="not remembered"):
            headers_now(before, unknown)
    async with AsyncOpenAI(base_url=url, api_key="one"):
        assert headers_now(before, [])["authorization"] == "Bearer one"
        async with AsyncOpenAI(base_url=url, api_key="two"):
            with pytest.raises(NotForecastable, match="different keys"):
                headers_now(before, [])
