"""Test how a run is begun, which program it belongs to, and when it writes a trace."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from flashmoa.link.learned_runs import Program
from flashmoa.observe import CallFinished, Event
from flashmoa.observe.events import FIRST
from flashmoa.observe.trace import read
from flashmoa.openai import agent, instrument, run
from flashmoa.openai import runs as _runs
from tests.unit.events import of_kind, warnings
from tests.unit.openai.fake_server import URL, FakeServer, ask, both_clients
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("programs")


async def test_the_last_programs_are_remembered(
    programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_runs, "MAX_PROGRAMS", 3)
    for name in ("used", "user-1", "user-2", "used", "user-3", "user-4", "used"):
        async with run(name):
            pass
    assert list(programs) == ["user-3", "user-4", "used"]
    (warning,) = warnings(caplog)
    assert "more than 3 programs" in warning


@pytest.mark.parametrize(
    ("files", "number"),
    [
        (["<ipython-input-3-0a1b2c>", "<ipython-input-17-0a1b2c>"], 1),
        (["<ipython-input-3-0a1b2c>", "<ipython-input-4-4d5e6f>"], 2),
        (["<ipython-input-3-123456>", "<ipython-input-4-234567>"], 2),
        (["<python-input-3>", "<python-input-4>"], 1),
        (["<stdin>", "<stdin>"], 1),
        (["trip-1.py", "trip-2.py"], 2),
    ],
)
async def test_an_input_of_a_shell_is_one_program(
    programs: dict[str, Program], files: list[str], number: int
) -> None:
    for file in files:
        names = {"run": run}
        exec(compile("begun = run()", file, "exec"), names)
        async with names["begun"]:  # type: ignore[attr-defined]
            pass
    assert len(programs) == number


async def test_a_decorated_functions_calls_are_runs(
    server: FakeServer, programs: dict[str, Program], tmp_path: Path
) -> None:
    events: list[Event] = []
    async with server.client() as client:

        @run("trip", trace=tmp_path / "trip.jsonl", listener=events.append)
        async def plan(city: str) -> str:
            return (await ask(client, city)).message.content

        assert await plan("Oslo") == await plan(city="Rome")
    assert plan.__name__ == "plan" and list(programs) == ["trip"]
    assert len(of_kind(events, CallFinished)) == 2


async def test_a_run_can_be_entered_again_when_left(
    programs: dict[str, Program], tmp_path: Path
) -> None:
    """And after an entry that failed."""
    file = tmp_path / "trip.jsonl"
    file.write_text("no trace")
    trip = run("trip", trace=file)
    with pytest.raises(ValueError, match=r"trip\.jsonl"):
        await trip.__aenter__()
    file.unlink()
    for _ in range(2):
        async with trip:
            with pytest.raises(RuntimeError, match=r"call run\(\) again"):
                await trip.__aenter__()
    assert list(programs) == ["trip"]


async def test_only_an_outermost_run_replaces_its_trace(server: FakeServer, tmp_path: Path) -> None:
    file, other = tmp_path / "run.jsonl", tmp_path / "inner.jsonl"
    async with server.client() as client:
        for _ in range(2):
            async with run("outer", trace=file):
                await ask(client, "First.")
                for inner in (file, other):
                    async with run("inner", trace=inner):
                        await ask(client, "Second.")
    run("never entered", trace=file)
    assert len(of_kind(read(file), CallFinished)) == 3
    assert not other.exists()


async def test_threads_loops_are_in_inherited_runs(
    server: FakeServer, programs: dict[str, Program]
) -> None:
    """Threads of ``asyncio.to_thread`` inherit it."""

    async def call() -> None:
        async with server.client() as client:
            await ask(client, "Go.")

    async def run_call() -> None:
        async with run("inner"):
            await call()

    async with run("outer"):
        await asyncio.to_thread(asyncio.run, run_call())
        await asyncio.to_thread(asyncio.run, call())
        await run_call()
    assert {name: len(each.recorded) for name, each in programs.items()} == {"outer": 3}


async def test_calls_have_the_name_of_their_agent(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server.client() as client, run("names") as report:
        with agent("planner"):
            with agent("writer"):
                await ask(client, "Write.")
            await ask(client, "Plan.")
        context = SimpleNamespace(agent=SimpleNamespace(name="critic"))
        module = SimpleNamespace(get_current_run_context=lambda: context)
        monkeypatch.setitem(sys.modules, "pydantic_ai._run_context", module)
        await ask(client, "Judge.")
        context.agent = None
        await ask(client, "Think.")
    names = [call.agent for call in report.calls]
    assert names[:3] == ["writer", "planner", "critic"]
    assert names[3].startswith("test_calls_have_the_name_of_their_agent:")


async def test_calls_have_names_of_agents_sdk(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK calls in a task of its own. A user's module may have the SDK's name."""

    class Agent:
        def __init__(self, name: object) -> None:
            self.name = name

    loop: dict[str, Any] = {"__name__": "agents.run_internal.run_loop"}
    turn = "async def take_turn(call, public_agent, older_agent=None):\n    await call"
    exec(turn, loop)
    async with server.client() as client, run("sdk") as report:
        for module in (SimpleNamespace(Agent=Agent), SimpleNamespace(Agent=str), SimpleNamespace()):
            monkeypatch.setitem(sys.modules, "agents", module)
            call = loop["take_turn"](ask(client, "Go."), Agent("writer"), Agent("boss"))
            await asyncio.create_task(call)
        monkeypatch.setitem(sys.modules, "agents", SimpleNamespace(Agent=Agent))
        await asyncio.create_task(loop["take_turn"](ask(client, "Go."), Agent(None)))
        mine = Agent("mine")  # Its class may be the user's.
        await ask(client, mine.name)
    names = [call.agent for call in report.calls]
    # If the SDK does not name an agent, the lines of code that call do.
    assert names[0] == "writer" and all(":" in name for name in names[1:])


async def test_the_first_run_is_only_watched(server: FakeServer) -> None:
    reasons: list[list[str]] = []
    async with server.client() as client:
        for topics in (["a", "b"], ["a", "b", "c"]):
            async with run("trip") as report:
                for topic in topics:
                    with agent(topic):
                        await ask(client, topic)
            reasons.append([call.started.unlinked for call in report.calls])
            assert str(report).count("only watched; later runs") == (len(topics) == 2)
    assert len(set(reasons[0])) == 1 and "later runs of it in this process" in reasons[0][0]
    assert [reasons[1][0], reasons[1][2]] == [FIRST, "the run before had no such call"]


async def test_a_client_is_observed_until_it_is_closed(
    server: FakeServer, programs: dict[str, Program]
) -> None:
    seen: list[str] = []
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    async with client, run("undone", listener=lambda event: seen.append(type(event).__name__)):
        with instrument(client) as same:
            assert same is client
            await ask(client.with_options(timeout=9), "Go.")
        closed = instrument(client)
        assert "AsyncOpenAI" in repr(closed) and "closed" not in repr(closed)
        closed.close()
        assert "closed" in repr(closed)
        before = len(seen)
        await ask(client, "Go.")
        assert seen.count("CallFinished") == 1 and len(seen) == before
        with instrument(client):
            with instrument(client):
                await ask(client, "Go.")
            await ask(client, "Go.")
        await ask(client, "Go.")
    assert seen.count("CallFinished") == 3
    with pytest.raises(TypeError, match=r"client of OpenAI in 'client'; give instrument"):
        instrument("client")


async def test_a_server_that_cannot_be_linked_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("flashmoa.link.prompt_feed._logged", set())
    client = openai.AsyncOpenAI(base_url=f"{URL.replace('//', '//me:secret@')}/v1", api_key="none")
    instrument(client)
    async with client, run("with a password"):
        for _ in range(2):
            await ask(client, "Go.")
    assert [each.levelname for each in caplog.records if "unlinked" in each.message] == ["ERROR"]
    assert "secret" not in caplog.text


@both_clients
async def test_calls_name_their_session_to_routers(server: FakeServer) -> None:
    """A header that the program itself sends stays as it is."""
    async with server.client() as client:
        for _ in range(2):
            async with run("named"):
                with agent("writer"):
                    await ask(client, "a")
                await ask(client, "a", extra_headers={"X-SMG-Routing-Key": "mine"})
    sent = server.headers()
    runs = [headers["X-Dynamo-Parent-Session-Id"] for headers in sent]
    assert runs[0] == runs[1] != runs[2] == runs[3]
    assert [headers["X-SMG-Routing-Key"] for headers in sent] == [runs[0], "mine", runs[2], "mine"]
    assert len({headers["X-Dynamo-Session-Id"] for headers in sent}) == 4


@both_clients
async def test_sequential_calls_share_a_session(server: FakeServer) -> None:
    """Their prompts begin alike, and routers keep a session on one engine."""

    def sessions_of(route: str) -> list[str]:
        return [headers["X-Dynamo-Session-Id"] for headers in server.headers(route)]

    async with server.client() as client:
        for number in range(2):
            async with run("dialogue"):
                for name in ("writer", "critic", "writer"):
                    with agent(name):
                        await ask(client, "Go on.")
                    if number:
                        await until(lambda: len(sessions_of("/prompt_streams")) == 2)
    ids = sessions_of("/completions")
    assert ids[0] == ids[2] != ids[1]
    assert ids[3] == ids[5] != ids[4]
    # Prompts that are prefilled ahead go to the same engine.
    assert sessions_of("/prompt_streams") == ids[4:]
