"""Run a program of plain OpenAI calls three times, linked: draft -> two reviews -> final plan.

The first run is watched; in later ones the prompts of the calls to come are prefilled while the
calls before them write. No call is changed for that.

    python examples/openai_runs.py [--engine http://HOST:30000 --model NAME]
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from engines import GUIDE, one_engine, one_engine_arguments, run_program

from flashmoa.observe import Event
from flashmoa.observe.calls import calls
from flashmoa.openai import AsyncOpenAI, run

TASKS = ["three days in Nepal", "three days in Nepal", "a week of walks around Pokhara"]


async def ask(client: AsyncOpenAI, model: str, role: str, question: str) -> str:
    """Return the answer of an agent that knows the guide."""
    messages: list[Any] = [
        {"role": "system", "content": f"{GUIDE.read_text()}\n\n{role}"},
        {"role": "user", "content": question},
    ]
    answer = await client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=64
    )
    return answer.choices[0].message.content or ""


async def plan(client: AsyncOpenAI, model: str, task: str) -> str:
    """Return a plan, drafted, reviewed twice at once, and rewritten."""
    draft = await ask(client, model, "You propose plans.", f"Plan {task}.")
    food, walks = await asyncio.gather(
        ask(client, model, "You judge the food in plans.", f"Judge this plan:\n{draft}"),
        ask(client, model, "You judge the walks in plans.", f"Judge this plan:\n{draft}"),
    )
    remarks = f"Draft:\n{draft}\n\nOn food:\n{food}\n\nOn walks:\n{walks}"
    return await ask(client, model, "You write final plans.", remarks)


def describe(events: list[Event]) -> str:
    """Return how many tokens of the run's prompts were computed before their requests came."""
    usages = [call.usage for call in calls(events) if call.usage is not None]
    streamed = sum(usage.streamed_tokens or 0 for usage in usages)
    late = sum(usage.late_tokens or 0 for usage in usages)
    return f"{streamed} tokens of the prompts were streamed, {late} were computed late"


async def main() -> None:
    """Plan three times, then once more unlinked."""
    arguments = one_engine_arguments(__doc__)
    async with (
        one_engine(arguments.engine) as url,
        AsyncOpenAI(base_url=url) as client,
    ):
        text = ""
        for task in TASKS:
            events: list[Event] = []
            start = time.perf_counter()
            async with run("plan", listener=events.append):  # The one line.
                text = await plan(client, arguments.model, task)
            print(f"{time.perf_counter() - start:.2f} s, {task}: {describe(events)}")
        same = await plan(client, arguments.model, TASKS[-1])
    print(text)
    print("The same unlinked:", same == text)


if __name__ == "__main__":
    run_program(main)
