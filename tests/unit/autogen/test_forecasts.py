"""When the forecast of an agent's prompt still holds, by the messages that it has received."""

from __future__ import annotations

import pytest

from flashmoa import Prompt, Slot
from flashmoa.autogen._team_link import awaits, has_received
from flashmoa.linking.forecasts import Turn
from flashmoa.linking.placeholders import UNCERTAIN


@pytest.mark.parametrize(("received", "is_used"), [(1, True), (2, False), (0, False)])
def test_a_complete_link_is_used_if_its_agent_received_what_was_forecast(
    received: int, is_used: bool
) -> None:
    assert has_received(received, 1, Prompt(["known"])) is is_used


@pytest.mark.parametrize("received", [0, 5])
def test_a_link_whose_end_is_uncertain_is_used_whatever_comes(received: int) -> None:
    assert has_received(received, 0, Prompt(["known", Slot(UNCERTAIN)]))


def test_a_link_waits_for_no_message_but_those_of_its_forecast() -> None:
    turn, later = Turn("b", (frozenset("a"),)), Turn("b", (frozenset("x"), frozenset("a")))
    waiting = Prompt(["known", Slot("a")])
    assert awaits(turn, 1, waiting)
    assert not awaits(turn, 0, waiting) and not awaits(later, 1, waiting)
    assert not awaits(turn, 1, Prompt(["known", Slot("a"), Slot(UNCERTAIN)]))
