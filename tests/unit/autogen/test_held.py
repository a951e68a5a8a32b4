"""Links of a team, and when they are no longer the right ones; without engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from flashmoa import EngineClient, Prompt, Slot
from flashmoa.autogen._forecast import UNCERTAIN
from flashmoa.autogen._held import HeldLinks
from flashmoa.autogen._roster import Basis
from flashmoa.autogen._speakers import Turn
from flashmoa.linking.link import Link

pytestmark = pytest.mark.anyio


@pytest.fixture
async def engine() -> AsyncGenerator[EngineClient]:
    async with EngineClient("http://127.0.0.1:9") as client:
        yield client


def held(engine: EngineClient, prompt: Prompt, came: int | None, coming: int = 1) -> Any:
    """One link, to ``b``, that has received ``came`` messages since the link was made."""
    links = HeldLinks(SimpleNamespace(since=lambda _: came), streams=True)  # type: ignore[arg-type]
    turn = Turn("b", (frozenset("a"),))
    links.add(Link(engine, prompt, agent="b"), Basis(turn, [], coming, 0, []))
    return links


@pytest.mark.parametrize(
    ("came", "is_used"), [(1, True), (2, False), (0, False), (None, False)], ids=str
)
async def test_a_complete_link_is_used_if_what_it_was_made_for_has_come(
    engine: EngineClient, came: int | None, is_used: bool
) -> None:
    links = held(engine, Prompt(["known"]), came)
    (link,) = (link for _, link in links.all())
    assert (links.take("b") is link) is is_used
    assert link.is_over is not is_used
    assert links.take("b") is None


@pytest.mark.parametrize(("came", "is_used"), [(5, True), (0, True), (None, False)], ids=str)
async def test_a_link_that_knows_only_a_beginning_is_used_unless_that_is_gone(
    engine: EngineClient, came: int | None, is_used: bool
) -> None:
    links = held(engine, Prompt(["known", Slot(UNCERTAIN)]), came, coming=0)
    assert (links.take("b") is not None) is is_used


async def test_a_link_that_still_waits_fits_only_without_messages_of_another_run(
    engine: EngineClient,
) -> None:
    later = Turn("b", (frozenset("x"), frozenset("a")))
    assert held(engine, Prompt(["known", Slot("a")]), came=0).fits(later) is False
    turn = Turn("b", (frozenset("a"),), sure=False)
    assert held(engine, Prompt(["known", Slot("a")]), came=0).fits(turn) is True
    assert held(engine, Prompt(["known", Slot("a")]), came=1).fits(turn) is False


async def test_a_link_for_a_turn_that_cannot_come_is_ended_at_the_second_look(
    engine: EngineClient,
) -> None:
    links = held(engine, Prompt(["known"]), came=0)
    (link,) = (link for _, link in links.all())
    for possible in (set[str](), {"b"}, set[str]()):
        links.end_idle(possible)
        assert not link.is_over
    links.end_idle(set())
    assert link.is_over and not links.all()


async def test_a_link_whose_prompt_is_the_same_goes_on(engine: EngineClient) -> None:
    links = held(engine, Prompt(["known"]), came=1)
    (link,) = (link for _, link in links.all())
    basis = Basis(Turn("b"), [], 0, 0, [])
    assert links.go_on(Prompt(["known"]), basis) is link
    assert links.go_on(Prompt(["other"]), basis) is None
    assert link.is_over
