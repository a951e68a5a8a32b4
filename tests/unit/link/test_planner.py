"""The link planner, with a minimal agent framework; without engines."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from flashmoa import EngineClient
from flashmoa._concurrency import TaskHost
from flashmoa.engine import EngineInfo, PromptUsage, soon
from flashmoa.engine.wire import TOKENS_HEADER
from flashmoa.errors import (
    EngineError,
    EngineUnreachable,
    MalformedRequest,
    PluginMissing,
    PromptTooLarge,
)
from flashmoa.link.after_tools import RequestAfterTools
from flashmoa.link.calls import CallRequest, CallResult, ObservedCall, OutputLengths
from flashmoa.link.expected import (
    ChatRequest,
    ExpectedRequest,
    RequestCaptured,
    Turn,
    first_request,
)
from flashmoa.link.link import Link
from flashmoa.link.options import LinkSettings
from flashmoa.link.planner import LinkedCall, LinkPlanner
from flashmoa.link.prompt import NotForecastable, Placeholders, Prompt, Slot
from flashmoa.link.reasons import NO_PLUGIN, OTHER_COURSE, OWN_TURN, UNEXPECTED
from flashmoa.observe import CallStarted, Event, LinkDeclined, LinkWaits
from flashmoa.observe.events import FIRST, LATE, ignore
from tests.unit.events import of_kind
from tests.unit.link.hung_engine import hung_engine
from tests.waiting import until

ENGINE = "http://127.0.0.1:9"
REQUEST = CallRequest(ENGINE, "m", None)
TURN = Turn("reader", (frozenset(["writer"]),))
LOOK, WALK = "look()", "walk()"


@dataclass
class Rendered:
    """A request whose prompt a function renders."""

    engine: EngineClient
    render: Callable[[], Awaitable[str]]
    namespace: Mapping[str, str] = field(default_factory=dict[str, str])


class Pair(LinkPlanner):
    """Plans for a team of two: a reader reads what a writer writes, who may call two tools."""

    is_running = True

    def __init__(self, engine: EngineClient, kv_share: float = 1.0) -> None:
        self.events: list[Event] = []
        super().__init__(self.events.append, LinkSettings(), kv_share=kv_share)
        self.forecasts = self.renders = 0
        self.may_forecast, self.may_render = anyio.Event(), anyio.Event()
        self.may_forecast.set()
        self.may_render.set()
        self.problem: str | None = None
        self.refusal: EngineError | None = None
        self.known = ""
        self.holds_still = True
        self.turn = TURN
        self.own = RequestAfterTools("writer", (LOOK, WALK), [self.after_tools])
        self._engine = engine

    async def upcoming(self, caller: str) -> Sequence[Turn]:
        return [self.turn] if caller == "writer" else []

    async def expect(self, turn: Turn) -> ExpectedRequest:
        self.forecasts += 1
        await self.may_forecast.wait()
        if self.problem is not None:
            raise NotForecastable(self.problem)
        placeholders = Placeholders(turn.writers)

        async def render() -> str:
            if self.refusal is not None:
                raise self.refusal
            return f"Read: {self.known or placeholders.padded('writer')}"

        request = Rendered(self._engine, render)
        return ExpectedRequest(turn, [request], placeholders, lambda *_: self.holds_still)

    async def after_tools(self, results: Mapping[str, str]) -> Rendered:
        async def render() -> str:
            """Escape the results, as the templates of some models do."""
            self.renders += 1
            await self.may_render.wait()
            shown = (f"\n{tool} '{text}'".replace("&", "&amp;") for tool, text in results.items())
            return "".join(["Go.", *shown, "\nSo"])

        return Rendered(self._engine, render)

    def request_after_tools(self, agent: str, answer: object) -> RequestAfterTools:
        assert answer is self.own
        return self.own

    def link_to(self, agent: str) -> Link | None:
        return next((link for link in self.links if link.agent == agent), None)

    async def linked(self, agent: str, prompt: str) -> Link:
        """Wait until the prompt of a link to an agent has this certain text."""

        def found() -> Link | None:
            link = self.link_to(agent)
            is_found = link and not link.is_over and link.prompt.stable() == prompt
            return link if is_found else None

        await until(found)
        return found()  # type: ignore[return-value]

    def reasons(self) -> list[str]:
        """Return why each call so far has no link."""
        return [event.unlinked for event in of_kind(self.events, CallStarted)]

    def late(self) -> list[bool]:
        """Return whether each call so far was late for its link."""
        return [event.late for event in of_kind(self.events, CallStarted)]

    def declined(self) -> list[LinkDeclined]:
        return of_kind(self.events, LinkDeclined)

    async def write(self, *, again: bool = False) -> Link:
        """Begin a call of the writer. Return the link to the reader, if ``again`` after a plan."""
        forecasts = self.forecasts + again
        self.begin("writer", REQUEST)
        await (self.planned(forecasts) if again else until(lambda: [*self.links]))
        return await self.link()

    async def link(self) -> Link:
        """Wait until there is a link to the reader."""
        await until(lambda: [*self.links])
        (link,) = self.links
        return link

    async def planned(self, forecasts: int = 0, *, renders: int = 0) -> None:
        """Wait until it has made N forecasts, has rendered M own requests, and is idle."""
        await until(lambda: self.forecasts >= forecasts and self.renders >= renders)
        await until(lambda: not self._planning.is_running)
        # Links are made in tasks of their own.
        await anyio.wait_all_tasks_blocked()


@pytest.fixture
async def planner(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Pair]:
    async def start(_: Link, host: TaskHost) -> None:
        """Do not connect to an engine."""

    monkeypatch.setattr(Link, "start", start)
    async with EngineClient(ENGINE) as engine:
        pair = Pair(engine)
        yield pair
        await pair.host.close()


async def test_a_call_overtakes_the_plan_of_its_link(planner: Pair) -> None:
    planner.may_forecast = anyio.Event()
    planner.begin("writer", REQUEST)
    await until(lambda: planner.forecasts)
    reader = planner.begin("reader", REQUEST)
    assert planner.reasons() == [FIRST, LATE] and planner.late() == [False, True]
    planner.may_forecast.set()
    await planner.planned(1)
    assert not planner.waiting_for("writer") and reader.prompt_stream_id is None


async def test_a_declined_agent_is_reported_once(planner: Pair) -> None:
    planner.problem = "it is secret"
    for count in (1, 2):
        planner.begin("writer", REQUEST)
        await planner.planned(count)
    (declined,) = planner.declined()
    assert (declined.agent, declined.reason) == ("reader", "it is secret")
    assert not planner.begin("reader", REQUEST).prompt_stream_id
    assert planner.late() == [False, False, False]
    planner.problem = None
    await planner.write()


async def test_an_unrenderable_prompt_is_declined(planner: Pair) -> None:
    for count in (1, 2, 3):
        refusal = f"tool {count} is no object" if count < 3 else "too long"
        kind = MalformedRequest if count < 3 else PromptTooLarge
        planner.refusal = kind(refusal, 400, "malformed" if count < 3 else "too_large")
        planner.begin("writer", REQUEST)
        await planner.planned(count)
    declined = planner.declined()
    assert {event.agent for event in declined} == {"reader"}
    # A reason is reported once, even if its words are others each time.
    reasons = [event.reason.rpartition(": ")[2] for event in declined]
    assert reasons == ["tool 1 is no object", "too long"]


async def test_a_reworded_failure_is_reported_once(
    planner: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "a", "b", "c"):
        planner.links.decline(name, OSError(f"no file {len(planner.events)}"))
    assert [event.agent for event in planner.events] == ["a", "b", "c"]
    monkeypatch.setattr("flashmoa.link.links.MAX_REMEMBERED", 3)
    planner.links.decline("d", OSError("no file"))
    assert len(planner.reported_declines) == 1


async def test_a_changed_expired_prompt_is_linked_again(planner: Pair) -> None:
    planner.turn, planner.known = Turn("reader"), "the plan"
    link = await planner.write()
    link.has_expired = True
    link.end("unused")
    assert await planner.write(again=True) is link
    planner.known = "the report"
    assert await planner.write(again=True) is not link


async def test_a_link_is_kept_while_its_prompt_is(planner: Pair) -> None:
    planner.turn, planner.known = Turn("reader"), "the plan"
    planner.holds_still = False
    link = await planner.write(again=True)
    assert await planner.write(again=True) is link and not link.is_over
    planner.known = "the report"
    assert await planner.write(again=True) is not link and link.is_over


async def test_a_call_without_a_link_says_why(planner: Pair) -> None:
    planner.problem = "its context is odd"
    for agent in ("other", "other", "writer", "reader", "end", "other"):
        if agent == "end":
            planner.end_all("unused")
        else:
            planner.begin(agent, REQUEST)
            await planner.planned()
    assert planner.reasons() == [FIRST, OWN_TURN, UNEXPECTED, "its context is odd", FIRST]


@pytest.mark.parametrize(
    ("error", "until_next"),
    [(EngineUnreachable("it is down"), "it is down"), (PluginMissing("no plugin"), NO_PLUGIN)],
)
async def test_a_refused_link_is_told_once(
    planner: Pair, error: EngineError, until_next: str
) -> None:
    """A later call has another reason, as nobody tried to link it."""
    planner.refusal = error
    for agent in ("writer", "reader", "other", "reader"):
        planner.begin(agent, REQUEST)
        await planner.planned()
    # Until the run ends, the planner knows that the engine is a plain one.
    later = NO_PLUGIN if isinstance(error, PluginMissing) else UNEXPECTED
    assert planner.reasons() == [FIRST, until_next, UNEXPECTED, later]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("abort", "its link was closed, as a text that it reads failed"),
        ("unused", "its link had ended, as no request came in time"),
        ("OSError: no", "its link failed: OSError: no"),
    ],
)
async def test_a_call_whose_link_has_ended_says_why(planner: Pair, end: str, reason: str) -> None:
    (await planner.write()).end(end)
    planner.begin("reader", REQUEST)
    assert planner.reasons() == [FIRST, reason]


@pytest.mark.parametrize(("url", "holds"), [("http://elsewhere", True), (ENGINE, False)])
async def test_another_call_does_not_use_the_link(planner: Pair, url: str, holds: bool) -> None:
    link = await planner.write()
    await planner.planned()
    planner.holds_still = holds
    planner.begin("reader", CallRequest(url, "m"))
    assert link.is_over and not [*planner.links]
    assert link.unused_reason == OTHER_COURSE and planner.reasons() == [FIRST, OTHER_COURSE]


async def test_a_link_ends_if_impossible_twice_in_a_row(planner: Pair) -> None:
    link = await planner.write()
    for caller in ("other", "writer", "other"):
        planner.caller = caller
        await planner._plan()
        assert not link.is_over
    await planner._plan()
    assert link.is_over and not [*planner.links]


class PlainEngine(EngineClient):
    """A server without the plugin's routes."""

    async def ask(self, *_: Any, **__: Any) -> Any:
        raise PluginMissing("no plugin")


class WithoutSize(EngineClient):
    """An engine that does not tell the size of its KV pool."""

    async def info(self) -> EngineInfo:
        await anyio.sleep_forever()
        raise AssertionError


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(PlainEngine, "its engine has no plugin"), (WithoutSize, "did not answer within")],
)
async def test_unsure_agents_need_the_engines_size(
    kind: type[EngineClient], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soon, "SOON_SECONDS", 0.05)
    async with kind(f"http://{kind.__name__}:9") as engine:
        planner = Pair(engine)
        planner.turn = Turn("reader", TURN.after, sure=False)
        planner.begin("writer", REQUEST)
        await until(planner.declined)
        assert reason in planner.declined()[0].reason
        planner.turn = TURN
        planner.plan()
        assert (await planner.link()).agent == "reader"
        await planner.host.close()


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
async def test_a_share_of_the_pool_is_checked(share: float) -> None:
    async with EngineClient(ENGINE) as engine:
        with pytest.raises(ValueError, match=r"kv_share is .*; it must be a number from 0 to 1"):
            Pair(engine, share)


async def test_a_link_knows_the_lengths_of_texts(planner: Pair) -> None:
    planner.output_lengths.add("writer", 120)
    assert (await planner.write())._expect("writer") == 120


async def test_text_before_a_tool_call_is_taken_back(planner: Pair) -> None:
    writer = planner.begin("writer", REQUEST)
    link = await planner.link()
    writer.on_text("I look.")
    assert link.prompt.take() == "Read: I look."
    writer.on_finish(CallResult("I look.", None, "tool_calls", is_forwarded=False))
    # Adapters are told the same as after an answer without text.
    (waits,) = of_kind(planner.events, LinkWaits)
    assert waits.reason == "it calls tools"
    writer.on_text(" Another thread told this too late.")
    assert not link.is_over and link.waits_for("writer")
    assert link.prompt.take_back() == len("Read: ") and link.prompt.take() == ""
    writer = planner.begin("writer", REQUEST)
    await planner.planned()
    assert [*planner.links] == [link]
    writer.on_text("Done.")
    writer.on_finish(CallResult("Done.", None, "stop", is_forwarded=True))
    assert link.prompt.take() == "Done." and link.prompt.is_complete
    assert planner.take_link("reader", ENGINE) is link


async def test_an_unheard_text_is_read_when_complete(planner: Pair) -> None:
    async with EngineClient(ENGINE) as engine:
        writer = planner.begin("writer", CallRequest(ENGINE, "m", client=engine))
        link = await planner.link()
        channel = writer.channel
        assert channel is not None
        await until(lambda: channel.problem)
        writer.on_finish(CallResult("Done.", None, "stop", is_forwarded=True))
        (waits,) = of_kind(planner.events, LinkWaits)
        assert (waits.agent, waits.upstream) == ("reader", "writer")
        assert "cannot be reached" in waits.reason
        assert link.prompt.stable() == "Read: Done." and link.prompt.is_complete


async def test_calls_of_a_run_share_a_channel() -> None:
    async with hung_engine() as server, EngineClient(server.url) as engine:
        planner, found = Pair(engine), set[str]()
        request = CallRequest(server.url, "m", client=engine)
        for _ in range(2):
            for agent in ("writer", "reader"):
                planner.begin(agent, request)
                await until(lambda: server.channels)
                found |= server.channels.keys()
            assert len(server.channels) == 1
            planner.end_all("unused")
            await until(lambda: not server.channels)
        assert len(found) == 2
        planner.begin("writer", request)
        await until(lambda: server.channels)
        await planner.host.close()
        await until(lambda: not server.channels)


async def test_a_text_that_is_rewritten_is_not_heard(planner: Pair) -> None:
    async with EngineClient(ENGINE) as engine:
        request = CallRequest(ENGINE, "m", "it is structured", engine)
        calls = [planner.begin("writer", request), planner.begin("writer", REQUEST, "it is cut")]
        calls.append(planner.begin("writer", CallRequest(ENGINE, "m")))
        assert [call.channel for call in calls] == [None] * 3
        for call in calls[:2]:
            call.on_text("Draft")
            assert not call.text.written


async def test_requests_say_the_lengths_of_answers(planner: Pair) -> None:
    """The length is in a header, since servers may refuse unknown fields."""

    def call(agent: str, answered: int) -> str | None:
        linked = LinkedCall(planner, agent, REQUEST)
        expected = ObservedCall([linked]).attempt(None, {}).headers.get(TOKENS_HEADER)
        usage = PromptUsage(prompt_tokens=9, completion_tokens=answered)
        linked.on_finish(CallResult("text", usage, "stop", is_forwarded=False))
        return expected

    assert [call("a", 10), call("a", 30), call("a", 900)] == [None, "10", "20"]
    assert [call("a", 30), call("b", 5)] == ["30", None]


async def test_an_engines_links_open_one_by_one() -> None:
    host = TaskHost("A link failed")
    async with hung_engine() as server, EngineClient(server.url) as engine:
        for number in range(5):
            link = Link(engine, Prompt([f"{number}"]), agent="a", listener=ignore)
            await link.start(host)
            assert link.stream_id is not None
        unwritten = Prompt([Slot("b")])
        await Link(engine, unwritten, agent="a", listener=ignore).start(host)
        server.hangs.add("open")
        with anyio.fail_after(10):
            await Link(engine, Prompt(["x"]), agent="a", listener=ignore).start(host)
        await host.close()


def test_only_the_last_answers_of_an_agent_count() -> None:
    lengths = OutputLengths()
    for tokens in [1000] * 8 + [10] * 8:
        lengths.add("a", tokens)
    assert lengths.expect("a") == 10


def call_tools(planner: Pair, *results: str) -> None:
    """Let the writer answer with calls of its tools, and let some tools return nothing."""
    result = CallResult("", None, "function_calls", is_forwarded=False, tool_calls=planner.own)
    planner.begin("writer", REQUEST).on_finish(result)
    for tool in results:
        planner.tools.add_result(planner.own, tool, "")


async def test_a_result_waits_for_earlier_results(planner: Pair) -> None:
    call_tools(planner)
    link = await planner.linked("writer", "Go.\nlook() '")
    planner.tools.add_result(planner.own, WALK, "2 h")
    await planner.planned(renders=2)
    assert planner.link_to("writer") is link and link.prompt.stable() == "Go.\nlook() '"
    assert [slot.name for slot in link.prompt.slots] == [LOOK]
    assert link.prompt.segments[-1] == "'\nwalk() '2 h'\nSo"


async def test_the_last_result_is_left_to_the_request(planner: Pair) -> None:
    call_tools(planner)
    link = await planner.linked("writer", "Go.\nlook() '")
    for tool in (LOOK, WALK):
        planner.tools.add_result(planner.own, tool, "")
    await planner.planned(renders=1)
    assert planner.link_to("writer") is link and not link.is_over
    planner.begin("writer", REQUEST)
    assert planner.link_to("writer") is None and link.is_over


async def test_fast_tools_make_no_link_nor_late_call(planner: Pair) -> None:
    call_tools(planner, LOOK, WALK)
    await planner.linked("reader", "Read: ")
    planner.plan()
    await planner.planned(renders=0)
    assert planner.link_to("writer") is None and not planner.renders
    planner.begin("writer", REQUEST)
    assert not any(planner.late())


@pytest.mark.parametrize("is_rendering", [False, True])
async def test_a_request_that_is_given_up_is_not_linked(planner: Pair, is_rendering: bool) -> None:
    if is_rendering:
        planner.may_render = anyio.Event()
    call_tools(planner)
    if is_rendering:
        await until(lambda: planner.renders)
    else:
        await planner.linked("writer", "Go.\nlook() '")
    # Later news change nothing.
    for results in ([], [LOOK]):
        for tool in results:
            planner.tools.add_result(planner.own, tool, "")
        planner.tools.give_up(planner.own)
        planner.may_render.set()
        await planner.planned(renders=1)
        assert planner.link_to("writer") is None


async def test_a_request_is_not_expected_for_ever(
    planner: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashmoa.link.after_tools.SLOWEST_TOOL_SECONDS", 0.5)
    call_tools(planner)
    await until(lambda: not planner.tools)
    await planner.planned(renders=1)
    assert planner.link_to("writer") is None


async def test_a_newer_request_replaces_its_agents_older(planner: Pair) -> None:
    older, newer = (RequestAfterTools("writer", (LOOK,), [planner.after_tools]) for _ in range(2))
    planner.tools.add(older)
    planner.tools.add(newer)
    assert older.over.is_set() and not newer.over.is_set()
    assert planner.tools["writer"] is newer
    planner.tools.give_up(older)
    assert planner.tools["writer"] is newer


@pytest.mark.parametrize("fails", [False, True])
async def test_a_dry_run_may_ask_in_a_task_group(fails: bool) -> None:
    expected = ChatRequest(EngineClient("http://127.0.0.1:9"), {"messages": []})

    async def ask() -> None:
        raise RequestCaptured(expected)

    async def fail() -> None:
        raise KeyError("own code")

    async def dry_run() -> None:
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            inner.create_task(ask())
            if fails:
                outer.create_task(fail())

    if not fails:
        assert await first_request(dry_run()) is expected
    else:
        with pytest.raises(ExceptionGroup) as problem:
            await first_request(dry_run())
        assert problem.group_contains(KeyError)
