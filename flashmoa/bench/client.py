"""What linking costs the client between one agent's last token and the next one's request.

A team of two, run watched and linked in turns on one engine; the time from the end of an
agent's call to the start of the next agent's is AutoGen's own plus, when linked, ours.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median

import anyio
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import ChatAgent, Team
from autogen_agentchat.teams import RoundRobinGroupChat
from rich.console import Console
from rich.table import Table

from flashmoa.autogen import FlashMoAChatCompletionClient, link, watch
from flashmoa.bench.arguments import command_line, positive
from flashmoa.bench.engines import Role, connected
from flashmoa.bench.report import Report, progress, terminal
from flashmoa.bench.rounds import order
from flashmoa.observe import CallFinished, CallStarted, Event

ROLES = (Role("flashmoa", plugin=True),)
_TURNS = 8
_ANSWER_TOKENS = 12
# A word of the benchmark's own tokenizer, with the space before it.
_TOKENS_PER_WORD = 1.3


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds between two agents' calls; medians over runs of each run's median."""

    prompt_tokens: int
    watched: float
    linked: float

    @property
    def added(self) -> float:
        return self.linked - self.watched


def main(arguments: Sequence[str]) -> int:
    """``flashmoa bench client``; returns the exit status."""
    parser = command_line("client", __doc__, ROLES)
    parser.add_argument("--prompts", type=positive, nargs="+", default=[2000, 28000])
    anyio.run(_main, parser.parse_args(arguments))
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    console = terminal()
    report = Report("client", arguments)
    async with connected(ROLES, arguments, 3 * max(arguments.prompts), console) as engines:
        await report.describe(engines)
        report.head(console)
        url = engines["flashmoa"].url
        costs = [await _measure(url, tokens, arguments, console) for tokens in arguments.prompts]
    show(costs, console)
    report.save(console, {"costs": [{**asdict(one), "added": one.added} for one in costs]})


async def _measure(url: str, tokens: int, arguments: argparse.Namespace, console: Console) -> Cost:
    dice = random.Random(arguments.seed)
    words = " ".join(
        dice.choice(("river", "temple", "trail", "valley", "market"))
        for _ in range(int(tokens / _TOKENS_PER_WORD))
    )
    client = FlashMoAChatCompletionClient(
        model="tiny",
        base_url=url,
        temperature=0,
        max_tokens=_ANSWER_TOKENS,
        extra_body={"ignore_eos": True},
    )
    gaps: dict[str, list[float]] = {"watched": [], "linked": []}
    used = 0
    with progress(console) as bars:
        bar = bars.add_task("warming up", total=2 * arguments.repeats)
        _, used = await _run(client, words, linked=True)
        for name in order(arguments.repeats, list(gaps)):
            bars.update(bar, description=f"{tokens} tokens {name}")
            found, _ = await _run(client, words, linked=name == "linked")
            gaps[name].append(found)
            bars.advance(bar)
    await client.close()
    return Cost(used, median(gaps["watched"]), median(gaps["linked"]))


async def _run(client: FlashMoAChatCompletionClient, words: str, linked: bool) -> tuple[float, int]:
    """The median gap of one run in seconds, and the tokens of its last prompt."""
    agents: list[ChatAgent | Team] = [
        AssistantAgent(name, model_client=client, system_message=f"You are {name}. {words}")
        for name in ("one", "two")
    ]
    team = RoundRobinGroupChat(agents, max_turns=_TURNS)
    events: list[Event] = []
    running = link(team, listener=events.append) if linked else watch(team, events.append)
    await team.run(task="Go on.")
    await running.close()
    calls = [event for event in events if isinstance(event, CallStarted | CallFinished)]
    gaps = [
        after.at - before.at
        for before, after in pairwise(calls)
        if isinstance(before, CallFinished) and isinstance(after, CallStarted)
    ]
    last = calls[-1]
    usage = last.usage if isinstance(last, CallFinished) else None
    return median(gaps), usage.prompt_tokens if usage is not None else 0


def show(costs: Sequence[Cost], console: Console) -> None:
    """Print the table."""
    title = "From one agent's last token to the next one's request, ms"
    table = Table(title=title, title_justify="left")
    for name in ("prompt tokens", "AutoGen alone", "linked", "added"):
        table.add_column(name, justify="right")
    for one in costs:
        times = (one.watched, one.linked, one.added)
        table.add_row(str(one.prompt_tokens), *(f"{value * 1000:.2f}" for value in times))
    console.print(table)
