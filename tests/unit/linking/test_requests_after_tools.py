"""The next requests of agents whose tools are running; without engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence

import anyio
import pytest

from flashmoa import EngineClient
from flashmoa.linking.calls import CallRequest, CallResult
from flashmoa.linking.forecasts import Forecast, RequestAfterTools, Turn
from flashmoa.linking.link import Link
from flashmoa.linking.placeholders import Placeholders
from flashmoa.linking.planner import LinkPlanner
from flashmoa.observe import CallStarted, Event

pytestmark = pytest.mark.anyio
REQUEST = CallRequest("http://engine", "m", None)
READER = Turn("reader", (frozenset(["writer"]),))
LOOK, WALK = "look()", "walk()"


class Team(LinkPlanner):
    """Plans for a writer that calls two tools, and an agent that reads what it writes at last."""

    is_running = True

    def __init__(self, engine: EngineClient) -> None:
        self.events: list[Event] = []
        super().__init__(self.events.append)
        self.own = RequestAfterTools("writer", engine, (LOOK, WALK), self.render)
        self.renders = 0
        self.may_render = anyio.Event()
        self.may_render.set()
        self._engine = engine

    async def render(self, results: Mapping[str, str]) -> str:
        """Escape the results, as the templates of some models do."""
        self.renders += 1
        await self.may_render.wait()
        shown = (f"\n{tool} '{text}'".replace("&", "&amp;") for tool, text in results.items())
        return "".join(["Go.", *shown, "\nSo"])

    async def upcoming(self, caller: str) -> Sequence[Turn]:
        return [READER] if caller == "writer" else []

    async def forecast(self, turn: Turn) -> Forecast:
        assert turn is READER
        placeholders = Placeholders(turn.writers)

        async def render() -> str:
            return f"Read: {placeholders.padded('writer')}"

        return Forecast(turn, self._engine, placeholders, [render])

    def request_after_tools(self, agent: str, answer: object) -> RequestAfterTools:
        assert isinstance(answer, RequestAfterTools)
        return answer

    def link_to(self, agent: str) -> Link | None:
        return next((link for link in self.links if link.agent == agent), None)

    async def linked(self, agent: str, prompt: str) -> Link:
        """Wait until there is a link to an agent with that certain text."""
        with anyio.fail_after(5):
            while True:
                link = self.link_to(agent)
                if link is not None and not link.is_over and link.prompt.stable() == prompt:
                    return link
                await anyio.sleep(0.001)

    async def rendered(self, times: int) -> None:
        """Wait until the own request was rendered that often and the planner is idle."""
        with anyio.fail_after(5):
            while self.renders < times or self._planning.is_running:  # noqa: ASYNC110
                await anyio.sleep(0.001)
        # Links are made in tasks of their own.
        await anyio.wait_all_tasks_blocked()


@pytest.fixture
async def team(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Team]:
    async def run(link: Link) -> None:
        """Do not connect to an engine."""
        await anyio.sleep_forever()

    monkeypatch.setattr(Link, "run", run)
    async with EngineClient("http://127.0.0.1:9") as engine:
        team = Team(engine)
        yield team
        await team.host.close()


def call_tools(team: Team, text: str = "") -> None:
    """Let the writer answer with calls of its tools, and a text before them."""
    writer = team.begin("writer", REQUEST)
    if text:
        writer.on_text(text)
    result = CallResult("", None, "function_calls", is_forwarded=False, tool_calls=team.own)
    writer.on_finish(result)


async def test_the_next_request_is_linked_up_to_the_first_missing_result(team: Team) -> None:
    call_tools(team)
    link = await team.linked("writer", "Go.\nlook() '")
    assert [slot.name for slot in link.prompt.slots] == [LOOK, WALK]
    # The agents that read what it writes in the end are linked all the while.
    await team.linked("reader", "Read: ")


async def test_results_are_added_in_the_order_of_the_calls(team: Team) -> None:
    call_tools(team)
    link = await team.linked("writer", "Go.\nlook() '")
    team.add_result(team.own, LOOK, "Lakes & more")
    assert await team.linked("writer", "Go.\nlook() 'Lakes &amp; more'\nwalk() '") is link


async def test_a_result_waits_for_those_before_it(team: Team) -> None:
    call_tools(team)
    link = await team.linked("writer", "Go.\nlook() '")
    team.add_result(team.own, WALK, "2 h")
    await team.rendered(2)
    assert team.link_to("writer") is link and link.prompt.stable() == "Go.\nlook() '"
    assert [slot.name for slot in link.prompt.slots] == [LOOK]
    assert link.prompt.segments[-1] == "'\nwalk() '2 h'\nSo"


async def test_the_last_result_is_left_to_the_request(team: Team) -> None:
    call_tools(team)
    link = await team.linked("writer", "Go.\nlook() '")
    for tool in (LOOK, WALK):
        team.add_result(team.own, tool, "")
    await team.rendered(1)
    assert team.link_to("writer") is link and not link.is_over
    team.begin("writer", REQUEST)
    assert team.link_to("writer") is None and link.is_over


async def test_tools_that_end_at_once_make_no_link_and_no_late_call(team: Team) -> None:
    call_tools(team)
    for tool in (LOOK, WALK):
        team.add_result(team.own, tool, "")
    await team.linked("reader", "Read: ")
    team.plan()
    await team.rendered(0)
    assert team.link_to("writer") is None and not team.renders
    team.begin("writer", REQUEST)
    assert not any(event.late for event in team.events if isinstance(event, CallStarted))


@pytest.mark.parametrize("is_rendering", [False, True])
async def test_a_request_that_is_given_up_is_not_linked_any_more(
    team: Team, is_rendering: bool
) -> None:
    if is_rendering:
        team.may_render = anyio.Event()
        call_tools(team)
        with anyio.fail_after(5):
            while not team.renders:  # noqa: ASYNC110
                await anyio.sleep(0.001)
    else:
        call_tools(team)
        await team.linked("writer", "Go.\nlook() '")
    team.give_up(team.own)
    team.may_render.set()
    await team.rendered(1)
    assert team.link_to("writer") is None
    # What is not held any more changes nothing.
    team.add_result(team.own, LOOK, "")
    team.give_up(team.own)
    await team.rendered(1)
    assert team.link_to("writer") is None


async def test_a_request_is_not_held_for_ever(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashmoa.linking.planner._LONGEST_TOOL_SECONDS", 0.05)
    call_tools(team)
    with anyio.fail_after(5):
        while team.holds(team.own):  # noqa: ASYNC110
            await anyio.sleep(0.001)
    await team.rendered(1)
    assert team.link_to("writer") is None


async def test_the_end_of_a_run_ends_what_is_held(team: Team) -> None:
    call_tools(team)
    link = await team.linked("writer", "Go.\nlook() '")
    team.end_all("closed")
    assert link.is_over and not team.holds(team.own)
    team.add_result(team.own, LOOK, "")
    team.plan()
    await team.rendered(1)
    assert team.link_to("writer") is None


async def test_links_that_were_fed_the_text_before_a_tool_call_are_made_again(team: Team) -> None:
    writer = team.begin("writer", REQUEST)
    link = await team.linked("reader", "Read: ")
    writer.on_text("Let me look.")
    assert link.prompt.stable() == "Read: Let me look."
    writer.on_finish(CallResult("", None, "function_calls", is_forwarded=False))
    assert link.is_over
    again = await team.linked("reader", "Read: ")
    team.begin("writer", REQUEST).on_text("A fine lake.")
    assert again.prompt.stable() == "Read: A fine lake."
