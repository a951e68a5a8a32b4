"""Test every failure of a text that another request reads, with every policy."""

from typing import Any

import pytest

from flashmoa import EngineClient, UpstreamCancelled, Workflow
from flashmoa.engine.local import LocalEngine
from flashmoa.errors import EngineTimeout, EngineUnreachable
from flashmoa.link.failure_policy import Action, Failure
from flashmoa.observe import Event
from tests.integration.baseline import Baseline
from tests.integration.failures.matrix import (
    BRIEF,
    CELLS,
    check_nothing_is_left,
    is_linked,
    policy,
    reasons,
    reported_failures,
)
from tests.integration.faulty_proxy import FaultyProxy
from tests.integration.support import chat_text
from tests.waiting import until

LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 150, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 12}
RAISED = {"error": EngineUnreachable, "cancel": UpstreamCancelled, "timeout": EngineTimeout}


def make_messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(("failure", "action"), CELLS)
async def test_a_failed_answer_follows_the_readers_policy(
    upstream_proxy: FaultyProxy,
    downstream: LocalEngine,
    baselines: tuple[Baseline, Baseline],
    guide: str,
    failure: Failure,
    action: Action,
) -> None:
    events: list[Event] = []
    seconds = BRIEF if failure == "timeout" else 60.0
    async with (
        check_nothing_is_left(*baselines),
        EngineClient(upstream_proxy.url, timeout=seconds) as writing,
        EngineClient(downstream.url) as reading,
        Workflow(reading, on_failure=policy(failure, action), listener=events.append) as flow,
    ):
        upstream_proxy.arm("reset" if failure == "error" else "stall")
        draft = flow.ask(make_messages(guide[:300]), engine=writing, name="draft", **LONG)
        review = flow.ask(make_messages(f"{guide[:900]}\n{draft}\nBetter?"), name="review", **SHORT)
        await until(lambda: upstream_proxy.has_struck and is_linked(events))
        if failure == "cancel":
            draft.cancel()
        if failure == "stall":
            await until(lambda: bool(reported_failures(events)))
        arrived = draft.written
        if failure == "stall" and action == "abort":
            upstream_proxy.release()
            arrived = await draft
        if failure != "stall" and action == "abort":
            with pytest.raises(RAISED[failure]):
                await review
        else:
            asked = make_messages(f"{guide[:900]}\n{arrived}\nBetter?")
            assert await review == await chat_text(reading, asked, **SHORT)
            assert review.usage is not None
            assert (review.usage.prompt_stream is not None) == (action == "finalize")
        upstream_proxy.release()
    assert reported_failures(events) == [("draft", failure, action)]
    assert reasons(events) == ("abort" if action == "abort" else "used")
