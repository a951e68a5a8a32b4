"""The options of links mean the same in AutoGen, in Agent Framework, in runs and in workflows."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from agent_framework import Agent
from agent_framework.orchestrations import SequentialBuilder
from anyio.abc import SocketStream

import flashmoa.agent_framework
import flashmoa.autogen
import flashmoa.openai
from flashmoa import EngineClient, LinkOptions, Workflow
from flashmoa.engine.wire import CALL_HEADER
from flashmoa.link.link import Ahead
from flashmoa.link.options import LinkSettings, SessionOf
from flashmoa.link.reasons import NO_LINKS
from flashmoa.observe import CallFinished, CallStarted, Event, PromptSent, UpstreamFailed
from flashmoa.observe.events import FIRST, WHOLE
from flashmoa.observe.trace import read
from tests.event_loop import own_task
from tests.unit.engine import faulty_engine as _server
from tests.unit.events import of_kind
from tests.unit.frameworks.autogen.teams import AssistantAgent, make_client, team_of
from tests.unit.link.hung_engine import HungEngine, Route, hung_engine, user
from tests.waiting import until

WORD = "Himalaya "


class Scribe(HungEngine):
    """Answers a writer and a reader.

    Attributes:
        ahead: what the writer waits for after its first word: that the word is in the reader's
            prompt ("text"), that the reader's link is open ("known"), or nothing.
        fails: whether the writer's connection then breaks.
    """

    ahead: Ahead = "nothing"
    fails = False

    @property
    def streamed(self) -> str:
        bodies = [*self.bodies("open"), *self.bodies("append")]
        return "".join(body.get("text") or "" for body in bodies)

    async def _answer(self, client: SocketStream, route: Route, request: _server.Received) -> None:
        if route != "chat":
            await super()._answer(client, route, request)
            return
        is_stream, words = request.body.get("stream"), ["is high."]
        if is_stream:
            await _server.start_events(client)
        if "reader" not in str(request.body["messages"]):
            words = [WORD, *words]
            if is_stream:
                await _server.send_event(client, _server.chunk({"content": WORD}))
            elif self.ahead == "text":
                await self.tell(request, WORD)
            if self.ahead == "text":
                await until(lambda: WORD.strip() in self.streamed)
            elif self.ahead == "known":
                await self.until("open")
            if self.fails:
                return
        if not is_stream:
            await _server.send(client, 200, _server.completion(words))
            return
        end = [_server.chunk({"content": "is high."}), _server.chunk({}, "stop"), "[DONE]"]
        for event in end:
            await _server.send_event(client, event)
        await client.send(b"0\r\n\r\n")


@pytest.fixture
async def scribe() -> AsyncGenerator[Scribe]:
    async with own_task(_server.listening(lambda url: Scribe(url, ()))) as engine:
        yield engine


async def play_autogen(scribe: Scribe, **options: Any) -> None:
    client = make_client(scribe.url, max_retries=0)
    names = ("writer", "reader")
    team = team_of(*(AssistantAgent(name, client, system_message=name) for name in names))
    async with flashmoa.autogen.link(team, **options) as linked:
        await team.run(task="Go.")
        check_shown(linked)
    await client.close()


async def play_agent_framework(scribe: Scribe, **options: Any) -> None:
    async with flashmoa.agent_framework.FlashMoAChatClient("m", base_url=scribe.url) as client:
        agents = [Agent(client, name, name=name) for name in ("writer", "reader")]
        workflow = SequentialBuilder(participants=agents).build()  # type: ignore[arg-type]
        async with flashmoa.agent_framework.link(workflow, **options) as linked:
            await workflow.run("Go.")
            check_shown(linked)


async def play_run(scribe: Scribe, **options: Any) -> None:
    async with flashmoa.openai.AsyncOpenAI(base_url=scribe.url, max_retries=0) as client:

        async def ask(name: str, text: str) -> str:
            messages: Any = user(f"{name}: {text}")
            with flashmoa.openai.agent(name):
                answer = await client.chat.completions.create(model="m", messages=messages)
            return answer.choices[0].message.content or ""

        ahead, fails, scribe.ahead, scribe.fails = scribe.ahead, scribe.fails, "nothing", False
        async with flashmoa.openai.run(scribe.url):  # A first run is only watched.
            await ask("reader", await ask("writer", "Go."))
        scribe.ahead, scribe.fails = ahead, fails
        scribe.requests.clear()
        async with flashmoa.openai.run(scribe.url, **options) as report:
            await ask("reader", await ask("writer", "Go."))
            check_shown(report)


async def play_workflow(scribe: Scribe, **options: Any) -> None:
    async with EngineClient(scribe.url) as engine, Workflow(engine, **options) as flow:
        draft = flow.ask(user("Go."), name="writer")
        await flow.ask(user(f"reader: {draft}"), name="reader")
        check_shown(flow)


def check_shown(handle: object) -> None:
    assert f"{handle}".count("2 calls linked") == repr(handle).count("2 calls linked") == 1
    assert repr(handle).startswith(f"<{type(handle).__name__}: ")


Play = Callable[..., Awaitable[None]]
PLAYS = [play_autogen, play_agent_framework, play_run, play_workflow]
everywhere = pytest.mark.parametrize("play", PLAYS, ids=lambda play: play.__name__)


@everywhere
@pytest.mark.parametrize("ahead", ["nothing", "known", "text", None])
async def test_ahead_says_how_much_is_prefilled(
    scribe: Scribe, play: Play, ahead: Ahead | None
) -> None:
    scribe.ahead = ahead or "text"
    events: list[Event] = []
    options: LinkOptions = {"listener": events.append}
    await play(scribe, **(options if ahead is None else {**options, "ahead": ahead}))
    assert len(of_kind(events, CallFinished)) == 2
    assert ("open" in scribe.routes()) == (ahead != "nothing")
    if ahead in ("nothing", "known"):
        assert WORD.strip() not in scribe.streamed
    # Calls ask for whole answers, as they do unlinked, and carry a name only if they are heard.
    chats = scribe.bodies("chat")[-2:]
    assert {bool(body.get("stream")) for body in chats} == {play is play_workflow}
    are_heard = ahead in ("text", None) and play is not play_workflow
    headers = scribe.headers("chat")[-2:]
    assert [CALL_HEADER.lower() in each for each in headers] == [are_heard] * 2
    # Each call says why it has no link, if it has none.
    first, second = [event.unlinked for event in of_kind(events, CallStarted)]
    assert first == NO_LINKS if ahead == "nothing" else first in (FIRST, WHOLE)
    assert second == (NO_LINKS if ahead == "nothing" else "")


@everywhere
@pytest.mark.parametrize(
    ("given", "action"),
    [
        ({}, "abort"),
        ({"on_failure": "finalize"}, "finalize"),
        ({"on_failure": {"reader": "finalize"}}, "finalize"),
        ({"on_failure": {"writer": "finalize"}}, "abort"),
    ],
    ids=str,
)
async def test_on_failure_acts_on_the_readers_link(
    scribe: Scribe, play: Play, given: dict[str, Any], action: str
) -> None:
    scribe.ahead, scribe.fails = "text", True
    events: list[Event] = []
    with suppress(Exception):  # A reader may raise the writer's error.
        await play(scribe, **given, listener=events.append)
    (failed,) = of_kind(events, UpstreamFailed)
    assert (failed.agent, failed.upstream, failed.action) == ("reader", "writer", action)


@everywhere
@pytest.mark.parametrize("prompts", [False, True])
async def test_a_trace_has_events_and_maybe_prompts(
    scribe: Scribe, play: Play, prompts: bool, tmp_path: Path
) -> None:
    file, events = tmp_path / "run.jsonl", list[Event]()
    await play(scribe, trace=file, trace_prompts=prompts, listener=events.append)
    assert len(of_kind(events, PromptSent)) == 2
    assert read(file) == [one for one in events if prompts or not isinstance(one, PromptSent)]
    await play(scribe, trace=file)
    # The next run's trace replaces this run's trace.
    again = read(file)
    assert again and not any(event in events for event in again)


@everywhere
async def test_unknown_options_are_refused(scribe: Scribe, play: Play) -> None:
    with pytest.raises(TypeError, match=r"no option 'stream'; the options are .*ahead, on_failure"):
        await play(scribe, stream=False)
    with pytest.raises(ValueError, match="ahead must be 'nothing', 'known' or 'text', not 'all'"):
        await play(scribe, ahead="all")
    with pytest.raises(ValueError, match="'abort' or 'finalize', not 'ignore'"):
        await play(scribe, on_failure={"reader": "ignore"})
    with pytest.raises(ValueError, match="give trace=FILE, too"):
        await play(scribe, trace_prompts=True)


def test_further_calls_of_an_agent_have_its_policy() -> None:
    settings = LinkSettings(on_failure={"writer": "finalize", "odd (2)": "finalize"})
    actions = {name: settings.policy(name).error for name in ("writer (2)", "odd (2)", "odd (3)")}
    assert actions == {"writer (2)": "finalize", "odd (2)": "finalize", "odd (3)": "abort"}


@pytest.mark.parametrize("headers", [{"X-Run": "team"}, {"X Run": "run"}, {"X-Run\n": "run"}])
def test_an_invalid_session_header_is_refused(headers: Any) -> None:
    with pytest.raises(ValueError, match="session_headers"):
        LinkSettings(session_headers=headers)


async def read_a_text(flow: Workflow, server: HungEngine) -> None:
    """Send a request with a text that is written once its prompt's stream is open."""
    with flow.text() as text:
        answer = flow.ask(user(f"a {text}"), name="reader")
        await server.until("open")
        text.write("b")
    await answer


async def test_requests_and_streams_name_their_session() -> None:
    """A prompt's stream names its request's session; each run has a session of its own."""
    own: dict[str, SessionOf] = {"X-Run": "run", "X-Agent": "agent"}
    async with hung_engine() as server, EngineClient(server.url) as engine:
        for _ in range(2):
            async with Workflow(engine, session_headers=own) as flow:
                await read_a_text(flow, server)
                flow.expect(user(f"b {flow.text()}"), name="reader")
                await server.until("open", 2)
            server.requests.clear()

    def sessions(*routes: Route) -> list[tuple[str, str]]:
        return [(each["x-run"], each["x-agent"]) for each in server.headers(*routes)]

    first, second = sessions("chat")
    assert sessions("open") == [first, first, second, second]
    assert first[0] != second[0] and first[1].startswith(first[0])
    assert set(sessions()) == {first, second}


async def test_only_parallel_calls_share_no_session() -> None:
    own: dict[str, SessionOf] = {"X-Agent": "agent"}
    async with (
        hung_engine() as server,
        EngineClient(server.url) as engine,
        Workflow(engine, session_headers=own) as flow,
    ):
        first = flow.ask(user("first"), name="writer")
        second = flow.ask(user(f"second {first}"), name="writer")
        other = flow.ask(user("other"), name="writer")
        checked = flow.ask(user(f"check {second}"), name="checker")
        for answer in (second, other, checked):
            await answer
        await flow.ask(user("third"), name="writer")
    asked = [body["messages"][0]["content"].split()[0] for body in server.bodies("chat")]
    sessions = [headers["x-agent"] for headers in server.headers("chat")]
    seen = dict(zip(asked, sessions, strict=True))
    assert seen["first"] == seen["second"] == seen["third"]
    assert len(set(seen.values())) == 3


async def test_a_clients_own_session_header_stays() -> None:
    """A program's own header is in its requests and in the requests for their streams."""
    mine = {"x-smg-routing-key": "mine"}
    async with (
        hung_engine() as server,
        EngineClient(server.url, headers=mine) as engine,
        Workflow(engine) as flow,
    ):
        await read_a_text(flow, server)
    assert {"open", "chat"} <= {*server.routes()}
    assert all("x-dynamo-session-id" in headers for headers in server.headers())
    assert {headers["x-smg-routing-key"] for headers in server.headers()} == {"mine"}
