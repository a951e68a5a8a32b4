"""Test a call of a linked team, without engines."""

from __future__ import annotations

import anyio
import pytest

from flashmoa import EngineClient, Prompt, Slot
from flashmoa.engine import PromptUsage
from flashmoa.linking import prompt_feed
from flashmoa.linking.link import Link
from flashmoa.linking.linked_call import CallOwner, LinkedCall
from flashmoa.linking.observed_call import CallRequest, CallResult, ObservedCall
from flashmoa.linking.output_lengths import OutputLengths
from flashmoa.observe import CallStarted, Event
from tests.unit.linking.hung_engine import hung_engine

pytestmark = pytest.mark.anyio


class Planner(CallOwner):
    """A planner that records events, and returns the links that a test gives it."""

    streams = True

    def __init__(self, *links: Link) -> None:
        self.events: list[Event] = []
        self.listener = self.events.append
        self.output_lengths = OutputLengths()
        self._links = links

    def waiting_for(self, agent: str) -> list[Link]:
        return [link for link in self._links if link.waits_for(agent)]

    def call_finished(self, call: LinkedCall) -> None: ...

    def tools_called(self, call: LinkedCall, answer: object) -> None: ...

    def call_taken_back(self, call: LinkedCall) -> None:
        for link in self.waiting_for(call.agent):
            link.end("abort")

    def call_failed(self, call: LinkedCall) -> None: ...

    def call_held_back(self, call: LinkedCall, reason: str) -> None: ...

    def release(self, link: Link) -> None: ...


async def test_a_call_that_overtakes_the_opening_of_its_stream_is_late() -> None:
    planner, request = Planner(), CallRequest("http://engine", "m", None)
    async with EngineClient("http://127.0.0.1:9") as engine:
        link = Link(engine, Prompt(["a"]), agent="b")
        LinkedCall(planner, "b", request, link, rewrite_reason=None, missed_link=False)
    (started,) = planner.events
    assert isinstance(started, CallStarted)
    assert started.late and started.stream_id is None


async def test_an_answer_that_differs_from_its_streamed_text_ends_the_links_to_it() -> None:
    """Its request broke off, was sent again, and got a different answer."""
    request = CallRequest("http://engine", "m", None)
    async with EngineClient("http://127.0.0.1:9") as engine:
        link = Link(engine, Prompt([Slot("a")]), agent="b")
        call = LinkedCall(Planner(link), "a", request, None, rewrite_reason=None, missed_link=False)
        call.text.follow(link)
        call.on_text("The quick")
        assert not link.is_over
        call.on_finish(CallResult("A dog.", None, "stop", is_forwarded=True))
    assert link.is_over and link.claim() is None
    assert not call.text.is_complete


def test_a_request_says_how_long_its_agents_last_answers_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only to engines that have opened a prompt stream: others may refuse the field."""
    known: set[str] = set()
    monkeypatch.setattr(prompt_feed, "_engines_with_plugin", known)
    planner, request = Planner(), CallRequest("http://engine", "m", None)

    def call(agent: str, given: dict[str, int], answered: int) -> dict[str, object]:
        linked = LinkedCall(planner, agent, request, None, rewrite_reason=None, missed_link=False)
        body = ObservedCall([linked], None).body(given)
        usage = PromptUsage(prompt_tokens=9, completion_tokens=answered)
        linked.on_finish(CallResult("text", usage, "stop", is_forwarded=False))
        return dict(body)

    assert "expected_output_tokens" not in call("a", {}, 10)
    assert "expected_output_tokens" not in call("a", {}, 30)
    known.add("http://engine")
    assert call("a", {}, 900)["expected_output_tokens"] == 20
    assert call("a", {}, 30)["expected_output_tokens"] == 30
    assert "expected_output_tokens" not in call("b", {}, 5)
    assert call("b", {"expected_output_tokens": 7}, 5)["expected_output_tokens"] == 7


async def test_an_engine_whose_plugin_is_missing_gets_no_fields_of_the_plugin_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another server has come up at its URL."""
    monkeypatch.setattr(prompt_feed, "_engines_with_plugin", set())
    async with hung_engine() as server, EngineClient(server.url, without_plugin="off") as engine:
        known = [await run_link(engine)]
        server.lacks.add("open")
        known.append(await run_link(engine))
        server.lacks.remove("open")
        known.append(await run_link(engine))
    assert known == [True, False, True]


async def run_link(engine: EngineClient) -> bool:
    """Run a link to a prompt. Return whether the engine is then known to have the plugin."""
    link = Link(engine, Prompt(["a"]), agent="b", unused_seconds=0.0)
    with anyio.fail_after(10):
        await link.run()
    return prompt_feed.is_known_to_have_plugin(engine.url)


def test_only_the_last_answers_of_an_agent_count() -> None:
    lengths = OutputLengths()
    for tokens in [1000] * 8 + [10] * 8:
        lengths.add("a", tokens)
    assert lengths.expect("a") == 10
