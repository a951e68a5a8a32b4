"""Run programs of frameworks without an event loop, unlinked, learned and linked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from flashmoa.observe import Event, LinkDeclined
from flashmoa.observe.calls import calls
from flashmoa.openai import run
from tests.integration.openai.programs import statuses

TOKENS = 64


async def check_linked(name: str, program: Callable[[], object]) -> list[str]:
    """Check that a program answers the same in a first and a second run, which is linked.

    Return the names of its calls.
    """
    events: list[Event] = []

    def play() -> None:
        unlinked = program()
        for _ in ("learned", "linked"):
            events.clear()
            with run(name, listener=events.append):
                assert program() == unlinked

    await asyncio.to_thread(play)
    made = calls(events)
    linked = [call for call in made if call.started.stream_id is not None]
    late = [call for call in made if call.started.late]
    declined = [event for event in events if isinstance(event, LinkDeclined)]
    hits = statuses(events).count("hit")
    row = (len(made), len(linked), hits, len(late), len(declined))
    print(f"{name}: %d calls, %d linked, %d hits, %d late, %d declined, texts the same" % row)
    # Nothing comes before the first call.
    assert len(made) > 2 and len(linked) >= 0.9 * (len(made) - 1 - len(late)) > 0
    assert hits >= 0.9 * len(linked)
    return [call.agent for call in made]
