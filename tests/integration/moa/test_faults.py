"""Whatever goes wrong with one agent's engine, there is an answer, and the result says how."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest

from flashmoa.engine import EngineClient
from flashmoa.link.failure_policy import UpstreamCancelled
from flashmoa.moa import (
    AggregationPrompt,
    Debate,
    Fallback,
    Limits,
    MixtureFailed,
    MixtureOfAgents,
    Model,
    Quorum,
    Staircase,
    Steps,
)
from tests.integration.faulty_proxy import FAULTS, Fault, FaultyProxy
from tests.integration.moa.agents import (
    PROBLEMS,
    QUESTION,
    agent,
    check_agent,
    faulty,
)
from tests.integration.support import slow, slow_except, wait_until_idle

PROMPT = AggregationPrompt("question-first", "Weigh these answers:")
# Makes the system of first agents and one that answers.
Make = Callable[..., Any]
KINDS: dict[str, Make] = {
    "mixture": lambda first, last, **more: MixtureOfAgents([first, [last]], prompt=PROMPT, **more),
    "staircase": Staircase,
    "debate": lambda first, last, **more: Debate(first, 2, last, **more),
    "debate staircase": lambda first, last, **more: Debate(
        first, 2, last, staircase=Steps(), **more
    ),
}
ALL_KINDS = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def cells(*fast: tuple[str, Fault], more: tuple[str, ...] = ()) -> list[Any]:
    """Return every fault of every kind, and of more; all but some are slow."""
    every = [(kind, fault) for kind in (*KINDS, *more) for fault in FAULTS]
    return [cell if cell in fast else slow(*cell) for cell in every]


def make_system(kind: str, first: list[Model], last: Model, **more: Any) -> Any:
    """Make a system. In a tree, ``first`` is the middle layer."""
    if kind == "tree":
        proposers = [replace(last, sampling={**last.sampling, "seed": n}) for n in range(4)]
        return MixtureOfAgents([proposers, first, [last]], "4-2-1", prompt=PROMPT, **more)
    return KINDS[kind](first, last, **more)


async def read_answer(system: Any) -> tuple[str, Any]:
    """Ask a system the question. Return the streamed text, and the result."""
    async with system.answering(QUESTION) as run:
        pieces = [piece async for piece in run]
        return "".join(pieces), await run.result()


@pytest.mark.parametrize(
    ("kind", "fault"),
    cells(
        ("mixture", "endless"),
        ("tree", "garbage"),
        ("staircase", "stall"),
        ("debate", "hang"),
        ("debate staircase", "refuse"),
        more=("tree",),
    ),
)
async def test_an_agent_that_fails_is_left_out(
    pair: tuple[EngineClient, EngineClient],
    proxy: FaultyProxy,
    proxied: EngineClient,
    kind: str,
    fault: Fault,
) -> None:
    small, large = pair
    proxy.fault = fault
    first = [agent(small, 1, max_tokens=24), faulty(proxied, fault, max_tokens=24)]
    text, result = await read_answer(make_system(kind, first, agent(large, 3, max_tokens=24)))
    assert text == result.text == result.final.text != "" and result.substitution is None
    layer = 1 if kind == "tree" else 0
    record = result.layers[layer].pop(1)
    if fault == "stall" and "staircase" in kind:
        # The text that the agent had written was read.
        assert record.status == "used" and PROBLEMS[fault] in record.problem
    else:
        check_agent(record, fault)
    if "debate" not in kind:
        assert all(record.status == "used" for record in result.agents)
    await wait_until_idle(small)


@pytest.mark.parametrize(
    ("kind", "fault"),
    cells(
        ("mixture", "stall"),
        ("mixture", "down"),
        ("staircase", "stall"),
        ("debate", "hang"),
        ("debate staircase", "refuse"),
    ),
)
async def test_another_agent_takes_the_place_of_the_last_one(
    pair: tuple[EngineClient, EngineClient],
    proxy: FaultyProxy,
    proxied: EngineClient,
    kind: str,
    fault: Fault,
) -> None:
    """A fallback model continues the answer; without one the best answer is the result."""
    small, large = pair
    proxy.fault = fault
    first = [agent(small, 1, max_tokens=24), agent(small, 2, max_tokens=24)]
    last = faulty(proxied, fault, max_tokens=40)
    other = Fallback([agent(large, 3, max_tokens=24)])
    for fallback in (other, Fallback()):
        text, result = await read_answer(make_system(kind, first, last, fallback=fallback))
        check_agent(result.layers[-1][0], fault)
        found, begun = result.substitution, result.layers[-1][0].text
        assert result.text and bool(begun) == (fault in ("stall", "endless"))
        if fault == "endless":
            assert found is None and result.finish_reason == "length"
            continue
        assert PROBLEMS[fault] in found.problem and found.agent == result.final.name
        if fallback is other:
            assert found.kind == "aggregator"
            # The fallback continues the begun text, because a client may have read it.
            assert text == result.text == begun + result.final.text
        else:
            assert (found.kind, found.agent) == ("answer", f"{len(result.layers) - 1}.1")
            assert text == (f"{begun}\n\n{result.text}" if begun else result.text)
    await wait_until_idle(small)


@ALL_KINDS
async def test_an_agent_that_is_refused_is_left_out(
    pair: tuple[EngineClient, EngineClient], make: Make
) -> None:
    small, large = pair
    refused = agent(small, 2, temperature=-1)
    result = await make([agent(small, 1), refused], agent(large)).answer(QUESTION)
    assert [one.status for one in result.layers[0]] == ["used", "failed"]
    assert result.layers[0][1].problem and result.text
    with pytest.raises(MixtureFailed, match="no agent answered"):
        await make([refused, refused], agent(large)).answer(QUESTION)
    async with EngineClient("http://127.0.0.1:9") as nowhere:
        strict = Fallback(best_answer=False)
        failing = make([agent(small, 1)] * 2, Model(nowhere), fallback=strict)
        with pytest.raises(MixtureFailed, match="the last aggregator failed"):
            await failing.answer(QUESTION)
    for engine in pair:
        await wait_until_idle(engine)


@ALL_KINDS
async def test_a_cancelled_run_frees_its_engines(
    pair: tuple[EngineClient, EngineClient], make: Make
) -> None:
    endless_agents = [agent(engine, max_tokens=2000) for engine in pair]
    for engine in pair:
        await engine.flush_cache()
    endless = make(endless_agents, endless_agents[0])
    with anyio.move_on_after(0.3):
        await endless.answer(QUESTION)
    async with endless.answering(QUESTION) as run:
        run.cancel()
        with pytest.raises(UpstreamCancelled):
            await run.result()
    # An answer written to its end would be in the cache.
    for engine in pair:
        assert (await wait_until_idle(engine)).evictable < 2000


@pytest.mark.parametrize("fault", slow_except(FAULTS[:-1], "stall", "hang"))
async def test_request_is_repeated_on_another_engine(
    pair: tuple[EngineClient, EngineClient],
    proxy: FaultyProxy,
    proxied: EngineClient,
    fault: Fault,
) -> None:
    small, large = pair
    proxy.fault = fault
    # The second client does not know that the engine did not answer the first client.
    async with EngineClient(proxy.url) as unaware:
        first, last = (
            replace(faulty(client, fault, max_tokens=24), backups=[large])
            for client in (proxied, unaware)
        )
        mixture = MixtureOfAgents([[agent(small, 1), first], [last]], prompt=PROMPT)
        async with mixture.answering(QUESTION) as run:
            pieces = [piece async for piece in run]
            result = await run.result()
    assert "".join(pieces) == result.text and result.substitution is None
    for record in (result.layers[0][1], result.final):
        assert record.status == "used" and record.engine == large.url
        [problem] = record.retries
        assert problem.startswith(proxy.url) and PROBLEMS[fault] in problem
        assert record.usage is not None and record.usage.completion_tokens >= 20


async def test_whole_layer_that_fails_is_skipped(
    pair: tuple[EngineClient, EngineClient], proxy: FaultyProxy, proxied: EngineClient
) -> None:
    small, large = pair
    proxy.fault = "refuse"
    between = [faulty(proxied, "refuse")] * 2
    layers = [[agent(small, seed) for seed in range(4)], between, [agent(large)]]
    result = await MixtureOfAgents(layers, "4-2-1", prompt=PROMPT).answer(QUESTION)
    assert [answer.status for answer in result.layers[1]] == ["failed"] * 2
    assert result.substitution is not None and result.substitution.agent == "3.2"
    # The aggregator read the proposers' answers.
    direct = MixtureOfAgents([layers[0], layers[2]], prompt=PROMPT)
    assert (await direct.answer(QUESTION)).text == result.text == result.final.text


async def test_quorum_goes_on_without_a_hanging_agent(
    pair: tuple[EngineClient, EngineClient], proxy: FaultyProxy, proxied: EngineClient
) -> None:
    small, large = pair
    proxy.fault = "hang"
    layers = [[agent(small, 1), agent(proxied, 2), agent(small, 3)], [agent(large)]]
    mixture = MixtureOfAgents(layers, prompt=PROMPT, quorum=Quorum(2, 0.1))
    debate = Debate(layers[0], 2, layers[1][0], quorum=Quorum(2, 0.1))
    staircase = Staircase(layers[0], layers[1][0], quorum=Quorum(2, 0.1))
    statuses = ["used", "left out", "used"]
    with anyio.fail_after(60):
        assert [one.status for one in (await mixture.answer(QUESTION)).layers[0]] == statuses
        for round_ in (await debate.answer(QUESTION)).layers[:2]:
            assert [one.status for one in round_] == statuses
        result = await staircase.answer(QUESTION)
    assert [one.status for one in result.agents] == [*statuses, "used"]


async def test_answer_ends_where_its_time_is_over(
    pair: tuple[EngineClient, EngineClient],
) -> None:
    small, large = pair
    slow_agent = replace(agent(small, max_tokens=3000), limits=Limits(answer_seconds=1.0))
    result = await MixtureOfAgents([[slow_agent], [agent(large)]], prompt=PROMPT).answer(QUESTION)
    [record] = result.layers[0]
    assert record.status == "used" and record.finish_reason == "length" and record.text
    await wait_until_idle(small)
