"""Test links to a stock SGLang server: prompts are prefilled ahead, and answers are the same."""

from collections.abc import AsyncGenerator

import pytest

from flashmoa import Workflow
from flashmoa.engine import EngineClient, EngineSettings
from flashmoa.engine.local import LocalEngine
from flashmoa.engine.plain import StepCosts
from flashmoa.observe import CallStarted, Event, LinkAdvanced, LinkClosed, LinkOpened
from flashmoa.observe.calls import calls
from flashmoa.observe.summary import link_status
from tests.integration.link.test_workflow import PARAMETERS, asks
from tests.waiting import until


@pytest.fixture
async def plain(plain_engine: LocalEngine) -> AsyncGenerator[EngineClient]:
    async with EngineClient(plain_engine.url, timeout=60) as client:
        await client.flush_cache()
        yield client


@pytest.fixture
def all_steps_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the overhead of steps for nothing: how long one takes depends on the machine."""
    monkeypatch.setattr(StepCosts, "least_tokens", 64)


async def review(plain: EngineClient, guide: str) -> tuple[str, int, list[Event]]:
    """Let a draft be written in two pieces, and wait for a step after each.

    Returns: the answer, the cached tokens that the server reports of its prompt, and the events.
    """
    events, is_off = list[Event](), plain.settings.without_plugin == "off"

    def steps() -> int:
        return sum(isinstance(event, LinkAdvanced) for event in events)

    async with Workflow(plain, listener=events.append) as flow:
        draft = flow.text("draft")
        answer = flow.ask(
            asks(f"{guide[:3000]} {draft} Shorten this."), name="review", **PARAMETERS
        )
        await until(lambda: is_off or steps() >= 1)
        draft.write(guide[4000:6000])
        await until(lambda: is_off or steps() >= 2)
        draft.write(guide[6000:6100])
        draft.close()
        text = await answer
        assert answer.usage is not None
        # SGLang leaves it out if there are none.
        return text, answer.usage.cached_tokens or 0, events


@pytest.mark.usefixtures("all_steps_pay")
async def test_a_linked_answer_equals_the_unlinked_one_and_its_prompt_is_cached(
    plain: EngineClient, guide: str
) -> None:
    linked, cached, events = await review(plain, guide)
    await plain.flush_cache()
    async with EngineClient(
        plain.url, timeout=60, engine_settings=EngineSettings(without_plugin="off")
    ) as off:
        unlinked, cached_before, others = await review(off, guide)
    assert linked == unlinked
    assert not any(isinstance(event, LinkOpened) for event in others)
    advanced = [event for event in events if isinstance(event, LinkAdvanced)]
    prefilled = advanced[-1].prefilled_tokens
    # The last tokens of the text so far may be others in the whole prompt.
    assert prefilled - 8 <= cached <= prefilled
    assert prefilled > advanced[0].prefilled_tokens + 64
    assert cached_before < 64
    (opened,) = [event for event in events if isinstance(event, LinkOpened)]
    (closed,) = [event for event in events if isinstance(event, LinkClosed)]
    (started,) = [event for event in events if isinstance(event, CallStarted)]
    assert opened.plain and opened.upstream == ("draft",)
    assert closed.reason == "used"
    assert opened.stream_id == closed.stream_id == started.stream_id
    (call,) = calls(events)
    assert call.plain_tokens == prefilled
    assert link_status(call) == "plain"
