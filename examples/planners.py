"""Three agents that plan a trip from the guide, one after the other; any framework can run them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from engines import GUIDE

TASK = "Plan three days in Nepal for two people."
ROLES = {
    "planner": "You propose a plan from the guide above.",
    "critic": "You say what is wrong with plans.",
    "writer": "You write the final plan.",
}

# Returns an agent's answer, given its name, its instructions and its question.
Ask = Callable[[str, str, str], Awaitable[str]]


async def plan(ask: Ask) -> str:
    """Return the writer's plan; each agent reads the earlier agents' answers."""
    guide, text = GUIDE.read_text(), TASK
    for name, role in ROLES.items():
        answer = await ask(name, f"{guide}\n\n{role}", text)
        text = f"{text}\n\n{name}: {answer}"
    return text
