"""The link planner, with a minimal agent framework; without engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import anyio
import pytest

from flashmoa import EngineClient
from flashmoa.engine import (
    EngineError,
    EngineInfo,
    MalformedRequest,
    PluginMissing,
    PromptTooLarge,
)
from flashmoa.linking.link import Link
from flashmoa.linking.observed_call import CallRequest, CallResult
from flashmoa.linking.placeholders import NotForecastable, Placeholders
from flashmoa.linking.planned_links import Forecast, Turn
from flashmoa.linking.planner import LinkPlanner
from flashmoa.observe import CallStarted, Event, LinkDeclined, LinkWaits

pytestmark = pytest.mark.anyio
REQUEST = CallRequest("http://engine", "m", None)
TURN = Turn("reader", (frozenset(["writer"]),))


class Pair(LinkPlanner):
    """Plans for a team of two: a reader that reads what a writer writes."""

    is_running = True

    def __init__(self, engine: EngineClient) -> None:
        self.events: list[Event] = []
        super().__init__(self.events.append)
        self.forecasts = 0
        self.may_forecast = anyio.Event()
        self.may_forecast.set()
        self.problem: str | None = None
        self.refusal: EngineError | None = None
        self.known = ""
        self.turn = TURN
        self._engine = engine

    async def upcoming(self, caller: str) -> Sequence[Turn]:
        return [self.turn] if caller == "writer" else []

    async def forecast(self, turn: Turn) -> Forecast:
        self.forecasts += 1
        await self.may_forecast.wait()
        if self.problem is not None:
            raise NotForecastable(self.problem)
        placeholders = Placeholders(turn.writers)

        async def render() -> str:
            if self.refusal is not None:
                raise self.refusal
            return f"Read: {self.known or placeholders.padded('writer')}"

        return Forecast(turn, self._engine, placeholders, [render])

    async def link(self) -> Link:
        """Wait until there is a link to the reader."""
        with anyio.fail_after(5):
            while not self._links.all():  # noqa: ASYNC110
                await anyio.sleep(0.001)
        (link,) = self._links.all()
        return link

    async def planned(self, forecasts: int) -> None:
        """Wait until that many forecasts have been made and the planner is idle."""
        with anyio.fail_after(5):
            while self.forecasts < forecasts or self._planning.is_running:  # noqa: ASYNC110
                await anyio.sleep(0.001)
        # Links are made in tasks of their own.
        await anyio.wait_all_tasks_blocked()


@pytest.fixture
async def planner() -> AsyncGenerator[Pair]:
    async with EngineClient("http://127.0.0.1:9") as engine:
        pair = Pair(engine)
        yield pair
        await pair.host.close()


async def test_a_link_gets_all_text_of_a_call_that_began_before_it(planner: Pair) -> None:
    writer = planner.begin("writer", REQUEST, rewrite_reason=None)
    writer.on_text("Once")
    link = await planner.link()
    writer.on_text(" more")
    assert link.prompt.stable() == "Read: Once more"
    writer.on_finish(CallResult("Once more.", None, "stop", is_forwarded=True))
    assert link.prompt.is_complete and link.prompt.stable() == "Read: Once more."


async def test_a_link_waits_through_a_call_of_tools_for_the_next_call(planner: Pair) -> None:
    tools = CallRequest("http://engine", "m", "it has tools")
    writer = planner.begin("writer", tools, rewrite_reason=None)
    link = await planner.link()
    writer.on_finish(CallResult("", None, "function_calls", is_forwarded=False))
    (waits,) = [event for event in planner.events if isinstance(event, LinkWaits)]
    assert (waits.agent, waits.upstream, waits.reason) == ("reader", "writer", "it has tools")
    planner.begin("writer", REQUEST, rewrite_reason=None).on_text("Done")
    assert link.prompt.stable() == "Read: Done"


async def test_a_forecast_that_a_call_overtakes_makes_no_link(planner: Pair) -> None:
    planner.may_forecast = anyio.Event()
    planner.begin("writer", REQUEST, rewrite_reason=None)
    with anyio.fail_after(5):
        while not planner.forecasts:  # noqa: ASYNC110
            await anyio.sleep(0.001)
    reader = planner.begin("reader", REQUEST, rewrite_reason=None)
    planner.may_forecast.set()
    await planner.planned(1)
    assert not planner.waiting_for("writer") and reader.prompt_stream_id is None
    late = [event.late for event in planner.events if isinstance(event, CallStarted)]
    assert late == [False, True]


async def test_a_declined_agent_is_forecast_again_and_reported_once(planner: Pair) -> None:
    planner.problem = "it is secret"
    for count in (1, 2):
        planner.begin("writer", REQUEST, rewrite_reason=None)
        await planner.planned(count)
    (declined,) = [event for event in planner.events if isinstance(event, LinkDeclined)]
    assert (declined.agent, declined.reason) == ("reader", "it is secret")
    assert not planner.begin("reader", REQUEST, rewrite_reason=None).prompt_stream_id
    late = [event.late for event in planner.events if isinstance(event, CallStarted)]
    assert late == [False, False, False]
    planner.problem = None
    planner.begin("writer", REQUEST, rewrite_reason=None)
    await planner.link()


async def test_a_prompt_that_cannot_be_rendered_is_declined(planner: Pair) -> None:
    for count in (1, 2, 3):
        refusal = f"tool {count} is no object" if count < 3 else "too long"
        kind = MalformedRequest if count < 3 else PromptTooLarge
        planner.refusal = kind(refusal, 400, "malformed" if count < 3 else "too_large")
        planner.begin("writer", REQUEST, rewrite_reason=None)
        await planner.planned(count)
    declined = [event for event in planner.events if isinstance(event, LinkDeclined)]
    assert {event.agent for event in declined} == {"reader"}
    # A reason is reported once, even if its words are others each time.
    reasons = [event.reason.rpartition(": ")[2] for event in declined]
    assert reasons == ["tool 1 is no object", "too long"]


async def test_an_agent_whose_code_fails_in_other_words_each_time_is_reported_once(
    planner: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "a", "b", "c"):
        planner.decline(name, OSError(f"no file {len(planner.events)}"))
    assert [event.agent for event in planner.events] == ["a", "b", "c"]
    monkeypatch.setattr("flashmoa.linking.planner._MOST_REPORTED", 3)
    planner.decline("d", OSError("no file"))
    assert len(planner._reported_declines) == 1


async def test_a_prompt_that_no_request_came_for_is_linked_again_only_if_it_changes(
    planner: Pair,
) -> None:
    planner.turn = Turn("reader")
    planner.known = "the plan"
    planner.begin("writer", REQUEST, rewrite_reason=None)
    link = await planner.link()
    link.has_expired = True
    link.end("unused")
    for known, is_same in [("the plan", True), ("the report", False)]:
        forecasts, planner.known = planner.forecasts, known
        planner.begin("writer", REQUEST, rewrite_reason=None)
        await planner.planned(forecasts + 1)
        assert (await planner.link() is link) is is_same


class PlainEngine(EngineClient):
    """An engine without the plugin."""

    async def info(self) -> EngineInfo:
        raise PluginMissing("no plugin")


async def test_without_the_plugin_only_agents_that_are_sure_to_be_next_are_linked() -> None:
    async with PlainEngine("http://127.0.0.1:9") as engine:
        planner = Pair(engine)
        planner.turn = Turn("reader", TURN.after, sure=False)
        planner.begin("writer", REQUEST, rewrite_reason=None)
        await planner.planned(1)
        (declined,) = [event for event in planner.events if isinstance(event, LinkDeclined)]
        assert "its engine has no plugin" in declined.reason
        planner.turn = TURN
        planner.plan()
        assert (await planner.link()).agent == "reader"
        await planner.host.close()


async def test_a_link_knows_how_long_its_writers_last_answers_were(planner: Pair) -> None:
    planner.output_lengths.add("writer", 120)
    planner.begin("writer", REQUEST, rewrite_reason=None)
    link = await planner.link()
    assert link._plain_feed._expect("writer") == 120
