"""Test every failure of a promised answer that another call reads, with every policy."""

from __future__ import annotations

import pytest
from autogen_core import CancellationToken
from autogen_core.models import UserMessage

from flashmoa.autogen._promises import _texts
from flashmoa.engine.local import LocalEngine
from flashmoa.linking.failure_policy import Action, Failure
from flashmoa.observe import Event
from tests.integration.baseline import Baseline
from tests.integration.failures.matrix import (
    CELLS,
    HAD_ARRIVED,
    PATIENCE,
    WHOLE,
    Make,
    check_nothing_is_left,
    is_linked,
    policy,
    record_cell,
    reported_failures,
    wait_until,
)
from tests.integration.failures.relay import Relay

pytestmark = pytest.mark.anyio


def make_messages(text: str) -> list[UserMessage]:
    return [UserMessage(content=text, source="user")]


@pytest.mark.parametrize(("failure", "action"), CELLS)
async def test_a_failed_promise_follows_the_readers_policy(  # noqa: PLR0913 - fixtures
    upstream_relay: Relay,
    downstream: LocalEngine,
    baselines: tuple[Baseline, Baseline],
    make: Make,
    guide: str,
    failure: Failure,
    action: Action,
) -> None:
    events: list[Event] = []
    token = CancellationToken()
    async with check_nothing_is_left(*baselines):
        upstream_relay.arm("reset" if failure == "error" else "stall")
        writing = make(upstream_relay.url, 150, timeout=PATIENCE if failure == "timeout" else 60.0)
        reading = make(downstream.url, on_failure=policy(failure, action), listener=events.append)
        draft = (
            await writing.promise(make_messages(guide[:300]), cancellation_token=token)
        ).content
        review = await reading.promise(make_messages(f"{guide[:900]}\n{draft}\nBetter?"))
        await wait_until(lambda: upstream_relay.has_struck and is_linked(events))
        if failure == "cancel":
            token.cancel()
        if failure == "stall":
            await wait_until(lambda: bool(reported_failures(events)))
        arrived = _texts[str(draft)].written
        if failure == "stall" and action == "abort":
            upstream_relay.release()
            arrived = await writing.result(str(draft))
        try:
            answer = await reading.result(str(review.content))
        except Exception as error:
            assert failure != "stall" and action == "abort"
            reader = f"raises {type(error).__name__}"
        else:
            assert failure == "stall" or action == "finalize"
            whole = make_messages(f"{guide[:900]}\n{arrived}\nBetter?")
            assert arrived and answer == (await reading.create(whole)).content
            reader = f"answers {HAD_ARRIVED if action == 'finalize' else WHOLE}"
        upstream_relay.release()
        for client in (writing, reading):
            await client.close()
    assert len(reported_failures(events)) == 1 and reported_failures(events)[0][1:] == (
        failure,
        action,
    )
    cell = record_cell("promise", failure, action, reader, events)
    assert cell.link == ("abort" if action == "abort" else "used")
