"""Test that an agent with a tool on the Responses API is linked while the tool runs.

`tests/coverage` has agents of all frameworks on chat completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import agents
import anyio

from flashmoa.observe import Event, LinkOpened
from tests.frameworks.conftest import MODEL
from tests.integration.openai.programs import STOP, TASK, Clients, play_linked, statuses


async def test_what_an_agent_asks_after_its_tool_was_prefilled(
    clients: Clients, guide: str
) -> None:
    """The Agents SDK's default model refuses answers that are cut."""
    agents.set_tracing_disabled(True)
    settings = agents.ModelSettings(
        temperature=0,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=1000,
        extra_body={"stop": STOP},
    )

    async def play(events: Sequence[Event], *, waits: bool) -> str:
        @agents.function_tool
        async def look(far: bool) -> str:
            """Look."""
            with anyio.fail_after(20):
                while waits and not any(isinstance(event, LinkOpened) for event in events):  # noqa: ASYNC110
                    await anyio.sleep(0.002)
            return f"A fine place, far: {far}."

        actor: Any = agents.Agent(
            "looker",
            instructions=guide[:3000],
            model=agents.OpenAIResponsesModel(MODEL, clients.first),
            tools=[look],
            model_settings=settings,
        )
        return str((await agents.Runner.run(actor, TASK)).final_output)

    unlinked = await play([], waits=False)
    for _ in ("first", "second"):
        events: list[Event] = []
        program = partial(play, events, waits=True)
        assert await play_linked("looker", program, events) == unlinked
        assert statuses(events) == [None, "hit"]
