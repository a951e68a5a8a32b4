"""Thought, costs and repetitions of agents, with engines that follow scripts."""

import math
import time

import anyio
import pytest

from flashmoa.engine import EngineClient, EngineSettings
from flashmoa.moa import Debate, EarlyExit, Limits, MixtureOfAgents, Model, Quorum, Staircase
from flashmoa.observe import CallFinished, Event
from tests.unit.events import of_kind
from tests.unit.moa.embedders import Embedder
from tests.unit.moa.scripted_engine import NOWHERE, PROMPT, Script, mix, scripted_engine

SCRIPTS: dict[str, Script] = {
    "parsed": [("thought", "Hm, "), ("thought", "17."), "It is ", "18."],
    "plain": ["It is ", "18."],
    "cut": ["It ", ("end", "cut")],
    "hung": ["It ", ("end", "hang")],
    "mute": [("thought", "Hm.")],
}


async def test_no_agent_reads_another_ones_thought() -> None:
    async with scripted_engine(SCRIPTS) as (engine, client):
        model = Model(client, "parsed")
        async with mix(client, [model, model], model).answering("What is 9 + 9?") as run:
            pieces = [piece async for piece in run]
            result = await run.result()
        debate = await Debate([model, model], 2, model).answer("What is 9 + 9?")
        staircase = await Staircase([model, model], model, prompt=PROMPT).answer("What is 9 + 9?")
    assert "".join(pieces) == result.text == debate.text == staircase.text == "It is 18."
    for record in (*result.agents, *debate.agents, *staircase.agents):
        assert record.thought == "Hm, 17."
    prompts = [message["content"] for body in engine.bodies for message in body["messages"]]
    assert not any("Hm" in prompt for prompt in prompts)
    assert sum("It is 18." in prompt for prompt in prompts) >= 3


async def test_agent_that_only_thinks_has_not_answered() -> None:
    async with scripted_engine(SCRIPTS) as (_, client):
        result = await mix(client, ["mute", "plain"], "mute").answer("?")
    first, second = result.layers[0]
    assert (first.status, first.problem, first.thought) == ("failed", "it answered nothing", "Hm.")
    assert second.status == "used" and result.text == "It is 18."
    assert result.substitution is not None and result.substitution.kind == "answer"


async def test_an_agent_whose_only_reader_is_left_out_is_stopped() -> None:
    async with scripted_engine(SCRIPTS) as (_, client):
        first = [Model(client, name) for name in ("plain", "plain", "plain", "hung")]
        second, last = [Model(client, "plain")] * 2, [Model(client, "plain")]
        quorums = [None, Quorum(1, 0.0)]
        mixture = MixtureOfAgents([first, second, last], "4-2-1", quorum=quorums)
        with anyio.fail_after(20):
            async with mixture.answering("?") as run:
                result = await run.result()
                # Before the whole question ends, which stops every agent.
                assert [agent.is_over for agent in run.agents] == [True] * 7
    statuses = [record.status for record in result.agents]
    assert statuses == [*["used"] * 3, "left out", "used", "left out", "used"]


async def test_early_exit_compares_no_thought() -> None:
    embedder = Embedder()
    policy = EarlyExit(embedder, tau=1.0, rule="threshold", threshold=0.1)
    async with scripted_engine(SCRIPTS) as (_, client):
        mixture = mix(client, ["parsed", "parsed", "hung"], "plain", early_exit=policy)
        with anyio.fail_after(20):
            result = await mixture.answer("?")
    assert embedder.texts == [["It is 18."] * 2]
    assert result.decisions[-1].left and result.deciding > 0
    # The thought's tokens are less likely than the answer's.
    confidences = [record.confidence for record in result.layers[0][:2]]
    assert confidences == pytest.approx([math.exp(-1)] * 2)


async def test_another_engine_continues_a_broken_answer() -> None:
    events: list[Event] = []
    async with (
        scripted_engine({"m": SCRIPTS["cut"], "plain": SCRIPTS["plain"]}) as (_, broken),
        scripted_engine({"m": ["is ", "18."]}) as (other, backup),
    ):
        last = Model(broken, "m", {"max_tokens": 9}, backups=[backup])
        async with mix(broken, ["plain"], last, listener=events.append).answering("?") as run:
            pieces = [piece async for piece in run]
            result = await run.result()
    assert "".join(pieces) == result.text == "It is 18."
    [body] = other.bodies
    assert body["messages"][-1] == {"role": "assistant", "content": "It "}
    assert body["continue_final_message"] and body["max_tokens"] == 8
    assert result.final.retries and result.final.engine == backup.url
    assert result.final.usage is not None and result.final.usage.completion_tokens == 3
    # The last event has the usage of the last request; the first request has failed.
    usage = of_kind(events, CallFinished)[-1].usage
    assert usage is not None and (usage.completion_tokens, usage.cached_tokens) == (2, None)


async def test_request_that_is_wrong_is_not_repeated() -> None:
    limits = Limits(attempts=3)
    async with scripted_engine(SCRIPTS) as (engine, client):
        wrong = Model(client, "plain", {"temperature": -1}, limits=limits)
        broken = Model(client, "cut", limits=limits)
        result = await mix(client, [wrong, broken, "plain"], "plain").answer("?")
    assert [len(record.retries) for record in result.layers[0]] == [0, 2, 0]
    assert "too cold" in result.layers[0][0].problem
    assert [body["model"] for body in engine.bodies].count("cut") == 3


async def test_request_without_an_engine_costs_nothing() -> None:
    settings = EngineSettings(without_plugin="off")
    async with (
        EngineClient(NOWHERE, engine_settings=settings) as nowhere,
        scripted_engine(SCRIPTS) as (_, client),
    ):
        mixture = mix(client, [Model(nowhere), "down", "plain"], "plain")
        result = await mixture.answer("word " * 1000)
    used = [record.usage for record in result.agents if record.status == "used"]
    assert len(used) == 2
    assert result.spending.prompt_tokens == sum(usage.prompt_tokens for usage in used if usage)


async def test_spending_adds_up_all_agents() -> None:
    async with scripted_engine(SCRIPTS) as (_, client):
        result = await mix(client, ["plain", "plain"], "parsed").answer("What is 9 + 9?")
    usages = [record.usage for record in result.agents if record.usage is not None]
    prompt = sum(usage.prompt_tokens for usage in usages)
    spent = result.spending
    assert (spent.prompt_tokens, spent.completion_tokens) == (prompt, 2 + 2 + 4)
    assert spent.tokens == prompt + 8


@pytest.mark.parametrize("text", [[], ["I look."]])
async def test_an_answers_time_includes_its_calls(text: list[str]) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    scripts: dict[str, Script] = {
        "plain": ["It is 18."],
        "calls": [*text, ("wait", "0.05"), ("call", "f")],
    }
    async with scripted_engine(scripts) as (_, client):
        started = time.time()
        async with mix(client, ["plain"], "calls").answering("?", {"tools": tools}) as run:
            async for _piece in run:
                pass
            finished = time.time()
            await anyio.sleep(0.1)
            result = await run.result()
    assert result.tool_calls and result.seconds < finished - started
    assert result.time_to_first_token <= result.seconds
    assert run._asked + result.seconds == pytest.approx(result.final.finished, abs=1e-4)


async def test_a_backup_is_not_blamed_for_an_answers_time() -> None:
    slow: Script = [("wait", "0.2"), ("thought", "Hm."), ("end", "cut")]
    async with (
        scripted_engine({"plain": SCRIPTS["plain"], "m": slow}) as (_, client),
        scripted_engine({"m": [("end", "hang")]}) as (other, backup),
    ):
        last = Model(client, "m", backups=[backup], limits=Limits(answer_seconds=1.5))
        result = await mix(client, ["plain"], last).answer("?")
    assert len(other.bodies) == 1 and backup.avoided_until is None
    assert result.substitution is not None
    assert "its 1.5 s were over" in result.substitution.problem


async def test_silent_engine_is_asked_last_for_a_while() -> None:
    scripts: dict[str, Script] = {"plain": [("end", "hang")]}
    async with scripted_engine(scripts) as (first, client), scripted_engine(SCRIPTS) as (_, other):
        limits = Limits(first_token_seconds=1.0)
        model = Model(client, "plain", backups=[other], limits=limits)

        async def ask() -> list[str]:
            """Return the engines that wrote the answers."""
            result = await mix(client, [model, model], model).answer("?")
            assert result.text == "It is 18."
            return [record.engine for record in result.agents]

        client.avoided_until = time.monotonic() + 60
        assert await ask() == [other.url] * 3 and not first.bodies
        # Once that time is over, one of two agents tries it again, and no later one.
        client.avoided_until = 0.0
        assert await ask() == [other.url] * 3 and len(first.bodies) == 1
        assert await ask() == [other.url] * 3 and len(first.bodies) == 1
        scripts["plain"] = SCRIPTS["plain"]
        client.avoided_until = 0.0
        assert client.url in await ask()
        assert await ask() == [client.url] * 3
