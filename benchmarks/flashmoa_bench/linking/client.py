"""Measure what linking costs the client between one agent's answer and the next one's request.

A team of two agents runs on one engine, in turns with AutoGen's own client and linked with ours.
The time from the last byte of an answer to the next request is measured at the socket. It includes
everything that the client does in between: AutoGen's messages and our links.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import httpx
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import ChatAgent, Team
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient

from flashmoa.autogen import FlashMoAChatCompletionClient, link
from flashmoa_bench.harness.command_line import Option, command, positive
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.harness.rounds import RoundPlayer

ROLES = (Role("flashmoa", plugin=True),)
_TURNS = 8
_ANSWER_TOKENS = 12
_WORDS = ("river", "temple", "trail", "valley", "market")


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds between two agents' calls; medians over runs of each run's median."""

    prompt_tokens: Annotated[int, Column("prompt tokens")]
    stock: Annotated[float, Column("AutoGen alone", "{:.2f}", 1000)]
    linked: Annotated[float, Column("linked", "{:.2f}", 1000)]
    added: Annotated[float, Column("added", "{:.2f}", 1000)]


class TimingTransport(httpx.AsyncHTTPTransport):
    """Notes when requests are sent and when their answers end, by ``time.perf_counter``."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: list[float] = []
        self._answered: list[float] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._sent.append(time.perf_counter())
        response = await super().handle_async_request(request)
        response.stream = _TimedStream(response.stream, self._answered)
        return response

    def take_gap(self) -> float:
        """Return the median time from an answer to the next request, and forget all times."""
        pairs = zip(self._answered, self._sent[1:], strict=False)
        gap = median(after - before for before, after in pairs)
        self._sent.clear()
        self._answered.clear()
        return gap


class _TimedStream(httpx.AsyncByteStream):
    """Appends the time of an answer's last byte to ``answered``."""

    def __init__(self, stream: Any, answered: list[float]) -> None:
        self._stream = stream
        self._answered = answered
        self._last: float | None = None

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        async for piece in self._stream:
            self._last = time.perf_counter()
            yield piece

    async def aclose(self) -> None:
        """Note the end; a client may close the stream without reading on after the last event."""
        if self._last is not None:
            self._answered.append(self._last)
            self._last = None
        await self._stream.aclose()


async def _measure(report: Report) -> None:
    prompts: list[int] = report.options.prompts
    async with report.connect(ROLES, 3 * max(prompts)) as engines:
        url = engines["flashmoa"].url
        costs = [await _compare(url, tokens, report) for tokens in prompts]
    report.show("From one agent's last token to the next one's request, ms", costs)
    report.save({"costs": costs})


async def _compare(url: str, tokens: int, report: Report) -> Cost:
    transport = TimingTransport()
    settings: dict[str, Any] = {
        "model": "tiny",
        "temperature": 0,
        "max_tokens": _ANSWER_TOKENS,
        "extra_body": {"ignore_eos": True},
        "http_client": httpx.AsyncClient(transport=transport, timeout=600),
    }
    ours = FlashMoAChatCompletionClient(base_url=url, **settings)
    stock = OpenAIChatCompletionClient(
        base_url=f"{url}/v1", api_key="EMPTY", model_info=ours.model_info, **settings
    )
    clients: dict[str, OpenAIChatCompletionClient] = {"stock": stock, "linked": ours}
    text = _make_text(ours, tokens, random.Random(report.options.seed))
    prompt_tokens = 0

    async def run(way: str) -> float:
        await _run_team(clients[way], text)
        return transport.take_gap()

    with RoundPlayer(report.console, report.options.repeats, len(clients)) as player:
        for client in clients.values():
            prompt_tokens = await _run_team(client, text)
        transport.take_gap()
        gaps = await player.play(list(clients), run, f"{tokens} tokens")
    for client in clients.values():
        await client.close()
    alone, linked = median(gaps["stock"]), median(gaps["linked"])
    return Cost(prompt_tokens, alone, linked, linked - alone)


def _make_text(client: FlashMoAChatCompletionClient, tokens: int, dice: random.Random) -> str:
    """Return a text of about ``tokens`` tokens."""
    words = [dice.choice(_WORDS) for _ in range(tokens)]
    message = UserMessage(content=" ".join(words), source="user")
    share = tokens / client.count_tokens([message])
    return " ".join(words[: int(share * len(words))])


async def _run_team(client: OpenAIChatCompletionClient, text: str) -> int:
    """Run a team of two agents, and return the number of tokens of its last prompt."""
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


main = command(
    "client",
    __doc__,
    _measure,
    ROLES,
    [Option("--prompts", positive, [2000, 28000], "tokens of a system message")],
)
