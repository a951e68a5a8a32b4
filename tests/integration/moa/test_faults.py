"""Whatever goes wrong with one agent's engine, there is an answer, and the result says how."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from flashmoa.engine import EngineClient
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
)
from tests.integration.moa.agents import (
    PROBLEMS,
    QUESTION,
    agent,
    check_agent,
    faulty,
    first_letter,
    read_answer,
)
from tests.integration.moa.faulty_proxy import FAULTS, Fault, FaultyProxy
from tests.integration.support import slow, slow_except, wait_until_idle

pytestmark = pytest.mark.anyio

PROMPT = AggregationPrompt("question-first", "Weigh these answers:")

CELLS = [
    (where, fault)
    if (where, fault) in (("proposer", "hang"), ("aggregator", "garbage"), ("proposer", "endless"))
    else slow(where, fault)
    for where in ("proposer", "aggregator")
    for fault in FAULTS
]


@pytest.mark.parametrize(("where", "fault"), CELLS)
async def test_mixture_leaves_out_an_agent_that_fails(
    pair: tuple[EngineClient, EngineClient],
    proxy: FaultyProxy,
    proxied: EngineClient,
    where: str,
    fault: Fault,
) -> None:
    small, large = pair
    layers = [[agent(small, seed) for seed in range(4)], [agent(small, 5), agent(large, 6)]]
    layer = 0 if where == "proposer" else 1
    layers[layer][1] = faulty(proxied, fault)
    proxy.fault = fault
    mixture = MixtureOfAgents([*layers, [agent(large, 7)]], "4-2-1", prompt=PROMPT)
    text, result = await read_answer(mixture)
    assert text == result.text == result.final.text != ""
    assert result.substitution is None
    check_agent(result.layers[layer].pop(1), fault)
    assert all(record.status == "used" for record in result.agents)
    await wait_until_idle(small)


@pytest.mark.parametrize("fault", slow_except(FAULTS, "stall", "refuse"))
async def test_another_aggregator_takes_the_place_of_the_last_one(
    pair: tuple[EngineClient, EngineClient],
    proxy: FaultyProxy,
    proxied: EngineClient,
    fault: Fault,
) -> None:
    small, large = pair
    proposers, last = [agent(small, 1), agent(small, 2)], faulty(proxied, fault, max_tokens=24)
    proxy.fault = fault
    mixture = MixtureOfAgents(
        [proposers, [last]], prompt=PROMPT, fallback=Fallback([agent(large, max_tokens=24)])
    )
    async with mixture.answering(QUESTION) as run:
        pieces = [piece async for piece in run]
        result = await run.result()
    assert "".join(pieces) == result.text != ""
    check_agent(result.layers[1][0], fault)
    if fault == "endless":
        assert result.substitution is None and result.finish_reason == "length"
        return
    assert result.substitution is not None and result.substitution.kind == "aggregator"
    assert result.substitution.agent == result.final.name == "2.2"
    assert PROBLEMS[fault] in result.substitution.problem
    # It continues what had been written, which somebody may have read.
    begun = result.layers[1][0].text
    assert bool(begun) == (fault == "stall") and result.text == begun + result.final.text


@pytest.mark.parametrize("fault", slow_except(FAULTS, "stall", "down"))
async def test_best_answer_takes_the_place_of_the_last_aggregators(
    pair: tuple[EngineClient, EngineClient],
    proxy: FaultyProxy,
    proxied: EngineClient,
    fault: Fault,
) -> None:
    proposers = [agent(pair[0], 1), agent(pair[0], 2)]
    proxy.fault = fault
    last = faulty(proxied, fault, max_tokens=24)
    async with MixtureOfAgents([proposers, [last]], prompt=PROMPT).answering(QUESTION) as run:
        pieces = [piece async for piece in run]
        result = await run.result()
    check_agent(result.layers[1][0], fault)
    if fault == "endless":
        assert result.substitution is None
        return
    assert result.substitution is not None and result.substitution.kind == "answer"
    assert result.substitution.agent == "1.1" and result.text == result.layers[0][0].text
    begun = result.layers[1][0].text
    assert "".join(pieces) == (f"{begun}\n\n{result.text}" if begun else result.text)
    strict = MixtureOfAgents(
        [proposers, [last]], prompt=PROMPT, fallback=Fallback(best_answer=False)
    )
    with pytest.raises(MixtureFailed, match="the last aggregator failed"):
        await strict.answer(QUESTION)


@pytest.mark.parametrize("fault", slow_except(FAULTS[:-1], "stall", "hang"))
async def test_request_is_repeated_on_another_engine(
    pair: tuple[EngineClient, EngineClient],
    proxy: FaultyProxy,
    proxied: EngineClient,
    fault: Fault,
) -> None:
    small, large = pair
    proxy.fault = fault
    # The second of these clients does not know that the engine did not answer the first.
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


async def test_vote_goes_back_to_the_last_round_with_answers(
    pair: tuple[EngineClient, EngineClient],
) -> None:
    small, _ = pair
    # The second round's prompts are too long for these debaters.
    context = await Model(small).context_length()
    assert context is not None
    debaters = [agent(small, seed, max_tokens=context - 60) for seed in (1, 2)]
    debaters = [replace(model, limits=Limits(answer_seconds=1.0), role="") for model in debaters]
    result = await Debate(debaters, 2, first_letter).answer("Why?")
    assert result.vote is not None and result.text
    assert [one.status for one in result.layers[1]] == ["failed"] * 2
    assert result.substitution is not None and result.substitution.agent == "1.1"
