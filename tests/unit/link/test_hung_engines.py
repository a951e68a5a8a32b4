"""An engine that does not answer delays neither requests nor closing, nor other engines' links."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext

import anyio
import anyio.lowlevel
import pytest
from autogen_core import CancellationToken

from flashmoa import EngineClient, Text, Workflow, errors
from flashmoa._concurrency import SingleFlight, TaskHost
from flashmoa.autogen import link
from flashmoa.engine import soon as _soon
from flashmoa.link.calls import CallRequest, CallResult
from flashmoa.link.expected import ChatRequest, ExpectedRequest, Turn
from flashmoa.link.options import LinkSettings
from flashmoa.link.planner import LinkPlanner
from flashmoa.link.prompt import Placeholders
from flashmoa.observe import CallStarted, Event, LinkClosed, LinkDeclined
from tests.unit.engine.faulty_engine import TEXT
from tests.unit.events import of_kind, warnings
from tests.unit.frameworks.autogen.teams import AssistantAgent, make_client, team_of
from tests.unit.link.hung_engine import HungEngine, Route, flowing, hung_engine, user
from tests.waiting import until

# Seconds that every operation here may take. A request to an engine that hangs takes 25 s.
SOON = 10.0


@contextmanager
def soon() -> Generator[None]:
    before = anyio.current_time()
    yield
    assert anyio.current_time() - before < SOON


async def reached(engine: HungEngine, text: Text, times: int = 1) -> None:
    """Wait until N links to a text hang, or until a piece of the text was appended."""
    hanging = [route for route in ("render", "open") if route in engine.hangs]
    await engine.until(hanging[0] if hanging else "open", times)
    if not hanging:
        text.write("a ")
        await engine.until("append", times)


@pytest.mark.parametrize("hangs", ["render", "open", "append"])
async def test_a_request_does_not_wait_for_its_link(hangs: Route) -> None:
    async with flowing(hangs) as (engine, flow, events):
        draft = flow.text("draft")
        answer = flow.ask(user(f"Read {draft}"))
        await reached(engine, draft)
        with soon():
            draft.finish("a plan")
            assert await answer == TEXT
    (started,) = of_kind(events, CallStarted)
    assert started.late == (hangs != "append")
    assert (started.stream_id is not None) == (hangs == "append")


async def test_a_link_to_a_silent_engine_ends() -> None:
    async with flowing("append", patience=0.1) as (engine, flow, events):
        draft = flow.text("draft")
        flow.expect(user(f"Read {draft}"))
        await reached(engine, draft)
        await until(lambda: of_kind(events, LinkClosed))
    (closed,) = of_kind(events, LinkClosed)
    assert closed.reason.startswith(f"EngineTimeout: {engine.url} did not answer in time")


@pytest.mark.parametrize(
    "hangs", [("render",), ("open",), ("append",), ("delete",), ("open", "delete")]
)
@pytest.mark.parametrize("is_error", [False, True])
async def test_leaving_a_workflow_does_not_wait(hangs: tuple[Route, ...], is_error: bool) -> None:
    events: list[Event] = []
    async with hung_engine(*hangs) as engine, EngineClient(engine.url, timeout=25.0) as client:
        with pytest.raises(ZeroDivisionError) if is_error else nullcontext():
            async with Workflow(client, listener=events.append) as flow:
                draft = flow.text("draft")
                expected = [flow.expect(user(f"Read {draft}"), name=f"e{n}") for n in range(3)]
                await reached(engine, draft, 3)
                if hangs == ("delete",):
                    # The workflow itself releases the stream of a claimed request, too.
                    assert expected[0].claim()
                    with soon():
                        await expected[0].release()
                before = anyio.current_time()
                if is_error:
                    raise ZeroDivisionError
        assert anyio.current_time() - before < SOON
        assert len(of_kind(events, LinkClosed)) == (0 if hangs == ("render",) else 3)


async def test_a_refused_request_does_not_wait() -> None:
    async with flowing("delete") as (engine, flow, _):
        draft = flow.text("draft")
        answer = flow.ask(user(f"Read {draft}"), max_tokens=-1)
        await reached(engine, draft)
        before = anyio.current_time()
        draft.finish("a plan")
        with pytest.raises(errors.EngineError):
            await answer
    assert anyio.current_time() - before < SOON and "delete" in engine.routes()


@pytest.mark.parametrize("hangs", ["render", "open", "delete"])
async def test_closing_linked_teams_does_not_wait(hangs: Route) -> None:
    async with hung_engine("chat") as writing, hung_engine(hangs) as reading:
        options = {"timeout": 25.0, "max_retries": 0}
        writer, reader = (make_client(engine.url, **options) for engine in (writing, reading))
        runs, token = list[asyncio.Future[object]](), CancellationToken()
        for _ in range(4):
            agents = AssistantAgent("writer", writer), AssistantAgent("reviewer", reader)
            linked = link(team := team_of(*agents))
            runs.append(asyncio.ensure_future(team.run(task="Go.", cancellation_token=token)))
        await reading.until("open" if hangs == "delete" else hangs, 4)
        with soon():
            await linked.close()
        with soon():
            await reader.close()
        token.cancel()
        await asyncio.wait(runs)
        await writer.close()


async def test_work_added_while_a_host_closes_is_done() -> None:
    host, done = TaskHost("work failed"), 0

    async def clean_up() -> None:
        nonlocal done
        with anyio.CancelScope(shield=True):
            await anyio.lowlevel.checkpoint()
        done += 1

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            host.start_cleanup(clean_up)

    for _ in range(3):
        host.start(work)
    await anyio.wait_all_tasks_blocked()
    await host.close()
    assert done == 3


@pytest.mark.filterwarnings("ignore:coroutine 'TaskHost._log_failures' was never awaited")
def test_work_left_by_a_loop_runs_in_the_next() -> None:
    """anyio leaves such work's coroutine to the garbage collector, which warns."""
    done: list[str] = []

    async def work() -> None:
        done.append("work")

    flight = SingleFlight(TaskHost("work failed"), work)

    async def program(steps: int) -> None:
        flight.request()
        for _ in range(steps):
            await anyio.lowlevel.checkpoint()

    asyncio.run(program(0))
    gc.collect()
    assert not flight.is_running and not done
    asyncio.run(program(9))
    assert done == ["work"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_host_is_closed_after_its_loop() -> None:
    host = TaskHost("work failed")

    async def begin() -> None:
        host.start(anyio.sleep_forever)
        await anyio.wait_all_tasks_blocked()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    asyncio.run(host.close())
    assert host._closed


WRITE = CallRequest("http://writer", "m", None)
READERS = ["hung", "a", "b", "c"]


class Candidates(LinkPlanner):
    """Plans for a writer and several readers, in any order."""

    is_running = True

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.events: list[Event] = []
        super().__init__(self.events.append, LinkSettings())
        self._engines = dict(zip(READERS, engines, strict=True))

    async def upcoming(self, caller: str) -> Sequence[Turn]:
        readers = READERS if caller == "writer" else []
        return [Turn(name, (frozenset(["writer"]),)) for name in readers]

    async def expect(self, turn: Turn) -> ExpectedRequest:
        engine, placeholders = self._engines[turn.agent], Placeholders(turn.writers)
        content = f"{turn.agent} reads {placeholders.padded('writer')}"
        request = ChatRequest(engine, {"messages": user(content)})
        return ExpectedRequest(turn, [request], placeholders)


@asynccontextmanager
async def engines() -> AsyncGenerator[tuple[list[HungEngine], list[EngineClient]]]:
    """Run an engine for each reader; the first one does not render prompts."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        servers = [await enter(hung_engine(*["render"][: name == "hung"])) for name in READERS]
        yield servers, [await enter(EngineClient(server.url)) for server in servers]


async def test_others_are_linked_while_one_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_soon, "SOON_SECONDS", 600.0)  # Nothing ends the wait for the hung engine.
    async with engines() as ((hung, *others), clients):
        planner = Candidates(clients)
        for times in (1, 2):
            # Nor does the second plan wait for the end of the first plan.
            writer = planner.begin("writer", WRITE)
            for server in others:
                await server.until("open", times)
            writer.on_text("a plan")
            for server in others:
                # A piece is appended once the answer that opens the stream has come.
                await server.until("append", times)
            writer.on_finish(CallResult("a plan", None, "stop", is_forwarded=True))
            for name, server in zip(READERS[1:], others, strict=True):
                reader = planner.begin(name, CallRequest(server.url, "m", None))
                assert reader.prompt_stream_id is not None
        assert hung.routes() == ["render"]
        await planner.host.close()
        assert not planner.links._making[hung.url].locked()


async def test_a_silent_engine_is_not_asked_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_soon, "SOON_SECONDS", 1.0)
    async with engines() as ((hung, *_), clients):
        planner = Candidates(clients)
        for times in (1, 2, 3):
            planner.begin("writer", WRITE)
            await until(lambda: len(of_kind(planner.events, LinkDeclined)) >= times)  # noqa: B023
        await planner.host.close()
        assert hung.routes() == ["render"]
        assert {each.agent for each in of_kind(planner.events, LinkDeclined)} == {"hung"}
        assert len([each for each in warnings(caplog) if hung.url in each]) == 1
        # It is asked again later.
        clients[0]._answering_soon._silent_until = 0.0
        hung.hangs.clear()
        assert await clients[0].render(user("?")) == "?"


async def test_an_engine_is_asked_a_few_times_at_once() -> None:
    engine = EngineClient("http://busy")
    inside, most, asked, goes_on = 0, 0, 0, anyio.Event()
    released = float("inf")

    async def ask() -> None:
        nonlocal inside, most, asked
        async with engine._answering_soon.limit():
            inside, asked = inside + 1, asked + 1
            most = max(most, inside)
            if goes_on.is_set():
                assert anyio.current_effective_deadline() >= released + _soon.SOON_SECONDS
            await goes_on.wait()
            await anyio.lowlevel.checkpoint()
            inside -= 1

    async with anyio.create_task_group() as group:
        for _ in range(100):
            group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        released = anyio.current_time()
        goes_on.set()
    assert most == _soon.MAX_IN_FLIGHT and asked == 100


@pytest.mark.parametrize(
    "refusal",
    [None, errors.BadAnswer(), errors.PluginMissing(), errors.RequestRefused("no", 500, "no")],
)
async def test_an_engine_that_answers_others_is_asked(
    refusal: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EngineClient("http://slow")
    with pytest.raises(errors.EngineTimeout):
        async with engine._answering_soon.limit():
            with nullcontext() if refusal is None else pytest.raises(type(refusal)):
                async with engine._answering_soon.limit():
                    if refusal is not None:
                        raise refusal
            raise errors.EngineTimeout("no answer")
    async with engine._answering_soon.limit():
        monkeypatch.setattr(_soon, "SOON_SECONDS", 0.0)
        with pytest.raises(errors.EngineTimeout):
            async with engine._answering_soon.limit():
                await anyio.sleep_forever()
        assert engine._answering_soon._silent_until
    # The first request has been answered since.
    assert not engine._answering_soon._silent_until
