"""Test links and scores on real vLLM servers: same answers, prompts that are cached when they come,
and scores that equal the log-probabilities of a completion.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import httpx
import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat

from flashmoa import Workflow
from flashmoa.autogen import FlashMoAChatCompletionClient, link
from flashmoa.engine import EngineClient, EngineSettings, PromptUsage
from flashmoa.observe import CallFinished, Event, LinkAdvanced, LinkClosed, LinkOpened
from flashmoa.observe.calls import calls
from flashmoa.scoring import Scorer
from tests.vllm.conftest import SERVED_NAME

pytestmark = pytest.mark.slow
Choice = Literal["prefill", "off"]
REPEATS = 5


@pytest.fixture
async def engines(servers: tuple[str, str]) -> AsyncGenerator[dict[Choice, list[EngineClient]]]:
    """Clients of both servers, by choice: ``prefill`` links, and ``off`` does not."""
    clients: dict[Choice, list[EngineClient]] = {"prefill": [], "off": []}
    for choice, of_choice in clients.items():
        for url in servers:
            of_choice.append(
                EngineClient(
                    url, model=SERVED_NAME, engine_settings=EngineSettings(without_plugin=choice)
                )
            )
    yield clients
    for of_choice in clients.values():
        for client in of_choice:
            await client.close()


@dataclass(frozen=True, slots=True)
class Run:
    """A chain of two calls; ``handoff`` is the time from A's last token to B's first."""

    texts: tuple[str, ...]
    usage: PromptUsage
    handoff: float
    events: list[Event]


async def run_chain(engines: list[EngineClient], guide: str, salt: str, tokens: int) -> Run:
    """Run two calls. The second call reads the text of the first call.

    Args:
        salt: runs with different salts share no cache.
    """
    events: list[Event] = []
    body: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "cache_salt": salt}
    async with Workflow(engines[0], listener=events.append) as flow:
        ask = [{"role": "user", "content": f"Plan a trip. {guide[:400]}"}]
        plan = flow.ask(ask, name="A", max_tokens=tokens, **body)
        read = [{"role": "user", "content": f"{guide[:8000]}\n{plan}\nShorten this."}]
        short = flow.ask(read, engine=engines[1], name="B", max_tokens=8, **body)
        texts = await plan, await short
    a, b = calls(events)
    assert a.finished is not None and b.first_token is not None and short.usage is not None
    return Run(texts, short.usage, b.first_token - a.finished.at, events)


async def test_linked_calls_answer_alike_and_find_their_prompts_cached(
    engines: dict[Choice, list[EngineClient]], guide: str
) -> None:
    unlinked = await run_chain(engines["off"], guide, "unlinked", 600)
    linked = await run_chain(engines["prefill"], guide, "linked", 600)
    assert linked.texts == unlinked.texts
    assert unlinked.usage.cached_tokens == 0
    assert not any(isinstance(event, LinkOpened) for event in unlinked.events)
    prefilled = [
        event.prefilled_tokens for event in linked.events if isinstance(event, LinkAdvanced)
    ][-1]
    assert linked.usage.cached_tokens is not None
    # vLLM caches whole blocks, of 128 tokens on a CPU.
    assert 1000 < prefilled - 128 - 8 <= linked.usage.cached_tokens
    closed = [event.reason for event in linked.events if isinstance(event, LinkClosed)]
    assert closed == ["used"]


async def test_a_linked_autogen_team_answers_alike(servers: tuple[str, str], guide: str) -> None:
    texts: dict[str, list[str]] = {}
    cached: dict[str, int] = {}
    choices: tuple[Choice, ...] = ("off", "prefill")
    for choice in choices:
        clients = [
            FlashMoAChatCompletionClient(
                model=SERVED_NAME,
                base_url=url,
                temperature=0,
                max_tokens=600,  # On a busy machine, prefilling takes this long.
                engine_settings=EngineSettings(without_plugin=choice),
                extra_body={"ignore_eos": True, "cache_salt": choice},
            )
            for url in servers
        ]
        agents = [
            AssistantAgent("writer", model_client=clients[0]),
            AssistantAgent("reader", model_client=clients[1], system_message=guide[:8000]),
        ]
        events: list[Event] = []
        team = RoundRobinGroupChat([*agents], max_turns=2)
        link(team, listener=events.append)
        await team.run(task="Go.")
        for client in clients:
            await client.close()
        finished = [event for event in events if isinstance(event, CallFinished)]
        texts[choice] = [event.text for event in finished]
        usage = finished[-1].usage
        assert usage is not None
        cached[choice] = usage.cached_tokens or 0
    assert texts["off"] == texts["prefill"]
    assert cached["prefill"] > 1000 > cached["off"]


async def test_scores_equal_the_logprobs_of_a_completion(
    engines: dict[Choice, list[EngineClient]], servers: tuple[str, str]
) -> None:
    """Score by ``/generative_scoring``; the first token that vLLM would write has a known score."""
    url, engine = servers[0], engines["prefill"][0]
    context = [{"role": "user", "content": "Is Pokhara worth a visit?"}]
    asked = {"model": SERVED_NAME, "messages": context, "max_tokens": 1, "temperature": 0}
    body = {**asked, "logprobs": True, "top_logprobs": 5}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        choice = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    [written] = choice["logprobs"]["content"]
    likeliest = {one["token"]: one["logprob"] for one in written["top_logprobs"]}
    candidates = [text for text in likeliest if text.isascii() and text.strip()]
    scores = await Scorer(engine).score(context, candidates)
    expected = [likeliest[text] for text in candidates]
    assert scores.logprobs == pytest.approx(expected, abs=1e-3)
    chosen = await Scorer(engine).select(context, ["lakes", "hills"])
    assert math.isclose(sum(chosen.answers[0].probabilities), 1)
    with_several = await Scorer(engine).score("We walk to", [" a lake near Pokhara", " the"])
    assert all(one < 0 for one in with_several.logprobs)


async def test_report_the_gain(
    engines: dict[Choice, list[EngineClient]],
    guide: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Report how much sooner B's first token comes; how much depends on the machine."""
    handoffs: dict[Choice, list[float]] = {"off": [], "prefill": []}
    for repeat in range(REPEATS):
        for choice, of_choice in engines.items():
            run = await run_chain(of_choice, guide, f"{choice} {repeat} {time.time()}", 300)
            handoffs[choice].append(run.handoff)
    unlinked, linked = median(handoffs["off"]), median(handoffs["prefill"])
    with capsys.disabled():
        print(
            f"\nvLLM, from A's last token to B's first, medians of {REPEATS}: unlinked "
            f"{unlinked:.3f} s, linked {linked:.3f} s, ratio {unlinked / linked:.2f}"
        )
