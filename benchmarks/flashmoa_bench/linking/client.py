"""What linking costs the client between one agent's last token and the next one's request.

A team of two on one engine, with AutoGen's own client and linked with ours, in turns. Measured
at the socket: from the last byte of an answer to the next request. All that happens between,
AutoGen's messages and our links, is the client's.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import anyio
import httpx
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import ChatAgent, Team
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from rich.console import Console
from rich.table import Table

from flashmoa.autogen import FlashMoAChatCompletionClient, link
from flashmoa_bench.harness.command_line import command_line, positive
from flashmoa_bench.harness.engines import Role, connected
from flashmoa_bench.harness.report import Report, progress, terminal
from flashmoa_bench.harness.rounds import alternating

ROLES = (Role("flashmoa", plugin=True),)
_TURNS = 8
_ANSWER_TOKENS = 12
_WORDS = ("river", "temple", "trail", "valley", "market")


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds between two agents' calls; medians over runs of each run's median."""

    prompt_tokens: int
    stock: float
    linked: float

    @property
    def added(self) -> float:
        return self.linked - self.stock


class Clock(httpx.AsyncHTTPTransport):
    """When requests begin and their answers end, by ``time.perf_counter``."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[float] = []
        self.ended: list[float] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.begun.append(time.perf_counter())
        response = await super().handle_async_request(request)
        response.stream = _Timed(response.stream, self.ended)
        return response

    def gap(self) -> float:
        """Return the median from one answer to the next request, and count from zero again."""
        gaps = [after - before for before, after in zip(self.ended, self.begun[1:], strict=False)]
        self.begun.clear()
        self.ended.clear()
        return median(gaps)


class _Timed(httpx.AsyncByteStream):
    def __init__(self, stream: Any, ended: list[float]) -> None:
        self._stream = stream
        self._ended = ended
        self._last: float | None = None

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        async for piece in self._stream:
            self._last = time.perf_counter()
            yield piece

    async def aclose(self) -> None:
        """Read to its end, or not: after the last event there is nothing more to wait for."""
        if self._last is not None:
            self._ended.append(self._last)
            self._last = None
        await self._stream.aclose()


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench client``; return the exit status."""
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
    clock = Clock()
    settings: dict[str, Any] = {
        "model": "tiny",
        "temperature": 0,
        "max_tokens": _ANSWER_TOKENS,
        "extra_body": {"ignore_eos": True},
        "http_client": httpx.AsyncClient(transport=clock, timeout=600),
    }
    ours = FlashMoAChatCompletionClient(base_url=url, **settings)
    stock = OpenAIChatCompletionClient(
        base_url=f"{url}/v1", api_key="EMPTY", model_info=ours.model_info, **settings
    )
    text = _text(ours, tokens, random.Random(arguments.seed))
    ways: dict[str, OpenAIChatCompletionClient] = {"stock": stock, "linked": ours}
    gaps: dict[str, list[float]] = {name: [] for name in ways}
    used = 0
    with progress(console) as bars:
        bar = bars.add_task("warming up", total=2 * arguments.repeats)
        for client in ways.values():
            used = await _run(client, text)
        clock.gap()
        for name in alternating(arguments.repeats, list(gaps)):
            bars.update(bar, description=f"{tokens} tokens {name}")
            await _run(ways[name], text)
            gaps[name].append(clock.gap())
            bars.advance(bar)
    for client in ways.values():
        await client.close()
    return Cost(used, median(gaps["stock"]), median(gaps["linked"]))


def _text(client: FlashMoAChatCompletionClient, tokens: int, dice: random.Random) -> str:
    """Return a text of about that many tokens."""
    words = [dice.choice(_WORDS) for _ in range(tokens)]
    message = UserMessage(content=" ".join(words), source="user")
    share = tokens / client.count_tokens([message])
    return " ".join(words[: int(share * len(words))])


async def _run(client: OpenAIChatCompletionClient, text: str) -> int:
    """Run a team of two; return the tokens of its last prompt."""
    agents: list[ChatAgent | Team] = [
        AssistantAgent(name, model_client=client, system_message=f"You are {name}. {text}")
        for name in ("one", "two")
    ]
    team = RoundRobinGroupChat(agents, max_turns=_TURNS)
    linked = link(team) if isinstance(client, FlashMoAChatCompletionClient) else None
    result = await team.run(task="Go on.")
    if linked is not None:
        await linked.close()
    usage = getattr(result.messages[-1], "models_usage", None)
    return usage.prompt_tokens if usage is not None else 0


def show(costs: Sequence[Cost], console: Console) -> None:
    """Print the table."""
    title = "From one agent's last token to the next one's request, ms"
    table = Table(title=title, title_justify="left")
    for name in ("prompt tokens", "AutoGen alone", "linked", "added"):
        table.add_column(name, justify="right")
    for one in costs:
        times = (one.stock, one.linked, one.added)
        table.add_row(str(one.prompt_tokens), *(f"{value * 1000:.2f}" for value in times))
    console.print(table)
