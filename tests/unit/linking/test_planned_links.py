"""The links that a planner holds, and when they do not fit any more; without engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from flashmoa import EngineClient, Prompt, Slot
from flashmoa.linking.link import Link
from flashmoa.linking.placeholders import UNCERTAIN, Placeholders
from flashmoa.linking.planned_links import Forecast, KvShare, PlannedLinks, Turn

pytestmark = pytest.mark.anyio


@pytest.fixture
async def engine() -> AsyncGenerator[EngineClient]:
    async with EngineClient("http://127.0.0.1:9") as client:
        yield client


def forecast(
    engine: EngineClient, turn: Turn, received: int | None = 0, expected: int = 0
) -> Forecast:
    placeholders = Placeholders(())
    return Forecast(
        turn, engine, placeholders, [], expected_messages=expected, received_since=lambda: received
    )


def held(
    engine: EngineClient, prompt: Prompt, received: int | None, expected: int = 1
) -> PlannedLinks:
    """Hold one link, to ``b``, which has received that many messages since the link was made."""
    links = PlannedLinks(streams=True)
    made_from = forecast(engine, Turn("b", (frozenset("a"),)), received, expected)
    links.add(Link(engine, prompt, agent="b"), made_from)
    return links


@pytest.mark.parametrize(
    ("received", "is_used"), [(1, True), (2, False), (0, False), (None, False)], ids=str
)
async def test_a_complete_link_is_used_if_its_agent_received_what_was_forecast(
    engine: EngineClient, received: int | None, is_used: bool
) -> None:
    links = held(engine, Prompt(["known"]), received)
    (link,) = links.all()
    assert (links.take("b", engine.url) is link) is is_used
    assert link.is_over is not is_used
    assert links.take("b", engine.url) is None


async def test_a_link_on_another_engine_than_the_call_goes_to_is_not_used(
    engine: EngineClient,
) -> None:
    links = held(engine, Prompt(["known"]), received=1)
    (link,) = links.all()
    assert links.take("b", "http://elsewhere") is None
    assert link.is_over and not links.all()


@pytest.mark.parametrize(("received", "is_used"), [(5, True), (0, True), (None, False)], ids=str)
async def test_an_uncertain_link_is_used_unless_its_team_was_reset(
    engine: EngineClient, received: int | None, is_used: bool
) -> None:
    links = held(engine, Prompt(["known", Slot(UNCERTAIN)]), received, expected=0)
    assert (links.take("b", engine.url) is not None) is is_used


async def test_a_waiting_link_is_not_used_after_unforecast_messages(
    engine: EngineClient,
) -> None:
    later = Turn("b", (frozenset("x"), frozenset("a")))
    assert held(engine, Prompt(["known", Slot("a")]), received=0).fits(later) is False
    turn = Turn("b", (frozenset("a"),), sure=False)
    assert held(engine, Prompt(["known", Slot("a")]), received=0).fits(turn) is True
    assert held(engine, Prompt(["known", Slot("a")]), received=1).fits(turn) is False


async def test_a_link_to_an_agent_that_is_not_possible_twice_in_a_row_is_ended(
    engine: EngineClient,
) -> None:
    links = held(engine, Prompt(["known"]), received=0)
    (link,) = links.all()
    for possible in (set[str](), {"b"}, set[str]()):
        links.end_idle(possible)
        assert not link.is_over
    links.end_idle(set())
    assert link.is_over and not links.all()


async def test_a_link_whose_prompt_stays_the_same_is_extended(engine: EngineClient) -> None:
    links = held(engine, Prompt(["known"]), received=1)
    (link,) = links.all()
    newer = forecast(engine, Turn("b"))
    assert links.extend(Prompt(["known"]), newer) is link
    assert links.extend(Prompt(["other"]), newer) is None
    assert link.is_over


@pytest.mark.parametrize("share", [-0.1, 1.1, "0.5", None])
def test_a_share_of_the_pool_is_between_none_and_all_of_it(share: object) -> None:
    with pytest.raises(ValueError, match=r"kv_share is .*; it must be a number from 0 to 1"):
        KvShare(share)  # type: ignore[arg-type]
