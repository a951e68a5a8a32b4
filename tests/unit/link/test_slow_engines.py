"""One engine that does not answer costs only the links of its own agents."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext

import anyio
import anyio.lowlevel
import pytest

from flashmoa import EngineClient, errors
from flashmoa.engine import soon
from flashmoa.link.calls import CallRequest, CallResult
from flashmoa.link.expected import ChatRequest, ExpectedRequest, Turn
from flashmoa.link.options import LinkSettings
from flashmoa.link.planner import LinkPlanner
from flashmoa.link.prompt import Placeholders
from flashmoa.observe import Event, LinkDeclined
from tests.unit.link.hung_engine import HungEngine, hung_engine
from tests.waiting import until

WRITE = CallRequest("http://writer", "m", None)
READERS = ["hung", "a", "b", "c"]


class Candidates(LinkPlanner):
    """Plans for a writer, after whom any of several readers may be next."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.events: list[Event] = []
        super().__init__(self.events.append, LinkSettings())
        self._engines = dict(zip(READERS, engines, strict=True))

    @property
    def is_running(self) -> bool:
        return True

    async def upcoming(self, caller: str) -> Sequence[Turn]:
        readers = READERS if caller == "writer" else []
        return [Turn(name, (frozenset(["writer"]),)) for name in readers]

    async def expect(self, turn: Turn) -> ExpectedRequest:
        engine, placeholders = self._engines[turn.agent], Placeholders(turn.writers)
        content = f"{turn.agent} reads {placeholders.padded('writer')}"

        request = ChatRequest(engine, {"messages": [{"role": "user", "content": content}]})
        return ExpectedRequest(turn, [request], placeholders)


@asynccontextmanager
async def engines() -> AsyncGenerator[tuple[list[HungEngine], list[EngineClient]]]:
    """Run an engine for each reader, of which the first one does not render prompts."""
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                hung_engine("render") if name == "hung" else hung_engine()
            )
            for name in READERS
        ]
        clients = [await stack.enter_async_context(EngineClient(server.url)) for server in servers]
        yield servers, clients


@pytest.fixture
def for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing end the wait for an engine that hangs."""
    monkeypatch.setattr(soon, "SOON_SECONDS", 600.0)


@pytest.mark.usefixtures("for_ever")
async def test_others_are_linked_while_one_engine_hangs() -> None:
    async with engines() as ((hung, *others), clients):
        planner = Candidates(clients)
        for times in (1, 2):
            # The second plan does not wait for the end of the first one either.
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
    monkeypatch.setattr(soon, "SOON_SECONDS", 0.5)
    async with engines() as ((hung, *_), clients):
        planner = Candidates(clients)
        for times in (1, 2, 3):
            planner.begin("writer", WRITE)
            await until(lambda: len(declined(planner)) >= times)  # noqa: B023
        await planner.host.close()
        assert hung.routes() == ["render"]
        assert {each.agent for each in declined(planner)} == {"hung"}
        warnings = [one for one in caplog.records if one.levelno >= logging.WARNING]
        assert len([one for one in warnings if hung.url in one.getMessage()]) == 1
        # It is asked again later.
        clients[0]._answering_soon._silent_until = 0.0
        hung.hangs.clear()
        assert await clients[0].render([{"role": "user", "content": "?"}]) == "?"


def declined(planner: Candidates) -> list[LinkDeclined]:
    return [event for event in planner.events if isinstance(event, LinkDeclined)]


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
                assert anyio.current_effective_deadline() >= released + soon.SOON_SECONDS
            await goes_on.wait()
            await anyio.lowlevel.checkpoint()
            inside -= 1

    async with anyio.create_task_group() as group:
        for _ in range(100):
            group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        released = anyio.current_time()
        goes_on.set()
    assert most == soon.MAX_IN_FLIGHT and asked == 100


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
        monkeypatch.setattr(soon, "SOON_SECONDS", 0.0)
        with pytest.raises(errors.EngineTimeout):
            async with engine._answering_soon.limit():
                await anyio.sleep_forever()
        assert engine._answering_soon._silent_until
    # The first one has been answered since.
    assert not engine._answering_soon._silent_until
