"""The requests of staircases, with engines that follow scripts."""

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa import Workflow
from flashmoa.engine import EngineClient
from flashmoa.link.pending_request import PendingRequest
from flashmoa.moa import Limits, MixtureOfAgents, Model, Quorum, Staircase
from flashmoa.moa.agent import StopFilter
from flashmoa.observe import CallFinished, Event
from tests.unit.events import of_kind
from tests.unit.moa.scripted_engine import scripted_engine


class RecordedRequests:
    """Records announced requests, and how often each was sent or released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.over: Counter[int] = Counter()
        self.announced: list[PendingRequest] = []
        announce = Workflow.expect

        def record(*arguments: Any, **more: Any) -> PendingRequest:
            self.announced.append(announce(*arguments, **more))
            return self.announced[-1]

        def recording(method: Any) -> Any:
            def record(pending: PendingRequest) -> Any:
                self.over[id(pending)] += 1
                return method(pending)

            return record

        monkeypatch.setattr(Workflow, "expect", record)
        for name in ("claim", "release"):
            monkeypatch.setattr(PendingRequest, name, recording(getattr(PendingRequest, name)))


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> RecordedRequests:
    return RecordedRequests(monkeypatch)


@pytest.mark.parametrize("ending", ["out of tokens", "failure", "stop"])
async def test_round_that_is_not_begun_is_released(requests: RecordedRequests, ending: str) -> None:
    """A part has 8 tokens, and the next round is announced with the first of them."""
    sampling = {"out of tokens": {"max_tokens": 8}, "stop": {"stop": "w7"}}.get(ending, {})
    last = [f"w{number} " for number in range(8 if ending != "failure" else 3)]
    scripts: dict[str, Any] = {"first": ["one "] * 60, "last": [*last, ("end", "cut")]}
    async with scripted_engine(scripts) as (_, client):
        model = Model(client, "last", sampling, limits=Limits(attempts=1))
        async with Staircase([Model(client, "first")], model).answering("Count.") as run:
            await run.result()
            # Before the whole question ends, which releases everything.
            assert requests.announced
            assert all(requests.over[id(pending)] for pending in requests.announced)


@pytest.mark.parametrize("model", ["counting", "strict"])
async def test_chunks_are_counted_by_the_engine_or_in_deltas(model: str) -> None:
    """Each delta of the proposer has two tokens."""
    scripts = {model: [f"a{number}+b " for number in range(30)], "last": ["w "] * 60}
    async with scripted_engine(scripts) as (engine, client):
        stairs = Staircase([Model(client, model)], Model(client, "last"))
        await stairs.answer("Count.")
        await client.close()
    prompts = [body["messages"][1]["content"] for body in engine.bodies if body["model"] == "last"]
    chunks = [len(re.findall(r"a[0-9]+", prompt)) for prompt in prompts]
    assert chunks[:2] == ([4, 12] if model == "counting" else [8, 24])
    asked = [body["stream_options"] for body in engine.bodies if body["model"] == model]
    assert all(options["include_usage"] for options in asked)
    # A server that has refused is not asked again.
    refused = [options for options in asked if "continuous_usage_stats" in options]
    assert len(refused) == 1 and len(asked) == (1 if model == "counting" else 2)


async def test_a_failed_answer_is_none_of_a_quorum() -> None:
    # When it is written, the quorum's time is over, and the other answer has failed.
    slow = [("wait", "0.3"), "It is 18."]
    scripts: dict[str, Any] = {"down": [], "slow": slow, "last": ["It is 18."]}
    async with scripted_engine(scripts) as (_, client):
        models = [Model(client, name) for name in ("down", "slow", "last")]
        result = await Staircase(models[:2], models[2], quorum=Quorum(1, 0.1)).answer("9 + 9?")
    assert result.text == "It is 18."
    assert [answer.status for answer in result.layers[0]] == ["failed", "used"]


async def test_an_answers_time_is_for_all_its_requests() -> None:
    scripts: dict[str, Any] = {
        "first": ["one "] * 200,
        "last": [*["w "] * 8, ("end", "hang")],  # The first part has 8 tokens.
    }
    async with scripted_engine(scripts) as (engine, client):
        last = Model(client, "last", limits=Limits(answer_seconds=1.5))
        result = await Staircase([Model(client, "first")], last).answer("Count.")
    assert len([body for body in engine.bodies if body["model"] == "last"]) == 2
    assert (result.text, result.finish_reason) == ("w " * 16, "length")


# The first part has 8 tokens. It is all thought, or thought and a line break.
@pytest.mark.parametrize("begin", [[("thought", "a ")] * 20, [*[("thought", "a ")] * 7, "\n"]])
async def test_a_thinking_agent_is_asked_again(
    requests: RecordedRequests, begin: list[Any]
) -> None:
    last = [*begin, *(f"w{number} " for number in range(12))]
    async with scripted_engine({"first": ["one "] * 20, "last": last}) as (engine, client):
        stairs = Staircase([Model(client, "first")], Model(client, "last"))
        result = await stairs.answer("Count.")
    asked = [body for body in engine.bodies if body["model"] == "last"]
    assert [body.get("max_tokens") for body in asked[:2]] == [8, None]
    assert asked[0]["messages"] == asked[1]["messages"]
    assert "continue_final_message" not in asked[1]
    assert "w0 w1 w2 w3 w4 w5 w6 w7 " in result.text and "a a" not in result.text
    # A first piece of white space has announced the next round, which keeps its stream.
    names = [pending._agent for pending in requests.announced]
    assert len(names) > 1 and len(set(names)) == len(names)


async def test_each_round_and_event_has_its_own_text() -> None:
    events: list[Event] = []
    # The end of the answer may be the beginning of the stop text.
    last = [*(f"w{number} " for number in range(5)), "E"]
    async with scripted_engine({"first": ["one "] * 20, "last": last}) as (_, client):
        model = Model(client, "last", {"stop": "END"})
        stairs = Staircase([Model(client, "first")], model, listener=events.append)
        result = await stairs.answer("Count.")
    steps = [step.text for step in result.final.steps]
    assert len(steps) > 1 and "".join(steps) == result.text and result.text.endswith("E")
    texts = [call.text for call in of_kind(events, CallFinished) if call.agent[0] == "2"]
    assert texts == [*steps[:-1], steps[-1].removesuffix("E")]


@pytest.mark.parametrize("is_staircase", [True, False])
async def test_prompts_are_rendered_with_their_fields(
    monkeypatch: pytest.MonkeyPatch, is_staircase: bool
) -> None:
    rendered: list[dict[str, Any]] = []

    async def render(_: EngineClient, messages: Any, **given: Any) -> str:
        rendered.append(given)
        return "".join(message["content"] for message in messages)

    monkeypatch.setattr(EngineClient, "render", render)
    fields = {"reasoning_effort": "low", "chat_template_kwargs": {"x": 1}}
    async with scripted_engine({"first": ["one "] * 60, "last": ["two "] * 60}) as (_, client):
        last = Model(client, "last", {**fields, "temperature": 0})
        first = [Model(client, "first")]
        mixture = Staircase(first, last) if is_staircase else MixtureOfAgents([first, [last]])
        await mixture.answer("Count.")
    assert rendered and all(each == fields for each in rendered)


stop_texts = st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3)


@given(st.text("ab.", max_size=20), stop_texts)
def test_text_ends_before_the_first_stop_text(text: str, stops: list[str]) -> None:
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
    expected = text
    if ends:
        complete = text[: ends[0]]
        expected = complete[: min(complete.index(stop) for stop in stops if stop in complete)]
    stopping = StopFilter(stops)
    kept = ""
    for letter in text:
        kept += stopping.add(letter)
        assert text.startswith(kept)
    assert kept + stopping.end() == expected and stopping.found == bool(ends)


def test_only_a_possible_stop_text_is_held_back() -> None:
    stopping = StopFilter(["END", ""])
    assert stopping.add("the E") == "the " and stopping.held == "E"
    assert stopping.add("N") == "" and stopping.add("d") == "ENd"
    assert stopping.add(" END of") == " " and stopping.found
    assert stopping.add("it") == stopping.end() == ""
