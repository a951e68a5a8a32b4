"""Mixtures on real engines: equal answers with and without links, failures and cancellation."""

from dataclasses import replace
from typing import Any

import pytest

from flashmoa.engine import EngineClient, EngineInfo
from flashmoa.engine.local import LocalEngine
from flashmoa.engine.wire import Prefilled
from flashmoa.link.link import Ahead
from flashmoa.moa import (
    AggregationPrompt,
    EarlyExit,
    Fallback,
    Limits,
    MixtureOfAgents,
    Result,
)
from flashmoa.observe import Event, LinkClosed
from tests.integration.moa.agents import QUESTION, agent
from tests.integration.support import wait_until_idle
from tests.unit.moa.embedders import Embedder

PROMPT = AggregationPrompt(instruction="Weigh these answers:")


def tree(pair: tuple[EngineClient, EngineClient], **more: Any) -> MixtureOfAgents:
    small, large = pair
    proposers = [agent(small if seed % 2 else large, seed) for seed in range(4)]
    layers = [proposers, [agent(small, 5), agent(large, 6)], [agent(large, 7)]]
    return MixtureOfAgents(layers, **{"prompt": PROMPT, **more})


def answers_by_layer(result: Result) -> list[list[str]]:
    """Return the answers of each layer; check that no agent failed."""
    assert [agent.problem for agent in result.agents if agent.problem] == []
    return [[answer.text for answer in layer] for layer in result.layers]


@pytest.mark.parametrize("layout", ["answers-first", "question-first"])
async def test_linked_mixture_equals_unlinked(
    pair: tuple[EngineClient, EngineClient], layout: Any
) -> None:
    prompt = AggregationPrompt(layout, "Weigh these answers:")
    ways: list[Ahead] = ["nothing", "known", "text"]
    results = []
    for ahead in ways:
        mixture = tree(pair, ahead=ahead, prompt=prompt)
        results.append(await mixture.answer(QUESTION))
    assert (
        answers_by_layer(results[0]) == answers_by_layer(results[1]) == answers_by_layer(results[2])
    )
    assert results[0].text == results[0].final.text != ""
    linked = results[2]
    usages = [answer.usage for layer in linked.layers[1:] for answer in layer]
    statuses = [usage.prompt_stream.status for usage in usages if usage and usage.prompt_stream]
    assert statuses.count("hit") >= 2 and set(statuses) == {"hit"}
    for answer in (answer for layer in linked.layers for answer in layer):
        assert answer.status == "used" and answer.cut_tokens == 0
        assert answer.started and answer.first_token and answer.finished
        assert answer.started <= answer.first_token <= answer.finished
    for place, reader in enumerate(linked.layers[1]):
        cluster = linked.layers[0][2 * place : 2 * place + 2]
        assert reader.started is not None
        assert all(answer.finished and answer.finished <= reader.started for answer in cluster)


async def test_a_fallbacks_prompt_is_cut_to_its_context(
    pair: tuple[EngineClient, EngineClient],
) -> None:
    small, large = pair
    proposers = [agent(small, seed, max_tokens=64) for seed in (1, 2)]
    refused = agent(large, temperature=-1.0)
    context = await refused.context_length()
    assert context is not None
    empty = PROMPT.messages([{"role": "user", "content": QUESTION}], [PROMPT.title(1)] * 2)
    room = context - len(await large.tokenize_chat(empty))
    # The prompt has room for the question and a quarter of the answers' 128 tokens.
    last = replace(agent(large, 3, max_tokens=room - 32), limits=Limits(answer_seconds=1.0))
    mixture = MixtureOfAgents([proposers, [refused]], prompt=PROMPT, fallback=Fallback([last]))
    result = await mixture.answer(QUESTION)
    assert result.substitution is not None and result.substitution.kind == "aggregator"
    assert result.text == result.final.text != ""


async def test_early_exit_cancels_the_remaining_agents(
    pair: tuple[EngineClient, EngineClient],
) -> None:
    small, large = pair
    slow = agent(large, 3, max_tokens=400)
    policy = EarlyExit(Embedder(), tau=1.0, rule="threshold", threshold=0.0)
    layers = [[agent(small, 1), agent(small, 2), slow], [agent(large)]]
    events: list[Event] = []
    mixture = MixtureOfAgents(layers, prompt=PROMPT, early_exit=policy, listener=events.append)
    result = await mixture.answer(QUESTION)
    [decision] = result.decisions
    assert decision.left and (decision.answers, decision.of) == (2, 3)
    assert decision.quality.agreement == 1
    assert [answer.status for answer in result.layers[0]] == ["used", "used", "left out"]
    assert result.layers[0][2].finished is None
    await wait_until_idle(large)
    # The aggregator read the two used answers only, numbered 1 and 2.
    alone = MixtureOfAgents([layers[0][:2], layers[1]], prompt=PROMPT)
    assert (await alone.answer(QUESTION)).text == result.text
    assert any(isinstance(event, LinkClosed) for event in events)


class RecordingClient(EngineClient):
    """A client that records requests: prompts, whether they ask for log-probabilities, others."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.logprobs: list[bool] = []
        self.others: list[str] = []
        self.prompts: list[Any] = []

    async def info(self) -> EngineInfo:
        self.others.append("info")
        return await super().info()

    async def prefill_only(self, **prompt: Any) -> Prefilled:
        self.others.append("prefill_only")
        return await super().prefill_only(**prompt)

    def chat(self, messages: Any, **parameters: Any) -> Any:
        self.logprobs.append(parameters.get("logprobs", False))
        self.prompts.append(messages)
        return super().chat(messages, **parameters)


@pytest.mark.parametrize(("min_answers", "scored"), [(1, [True, True]), (2, [True, False])])
async def test_only_scored_answers_have_logprobs(
    pair: tuple[EngineClient, EngineClient], min_answers: int, scored: list[bool]
) -> None:
    """With ``min_answers=2`` a cluster of two cannot exit early and is not scored.

    The last answer is never scored. Stock SGLang mixes no prefill into decode steps of requests
    with log-probabilities."""
    policy = EarlyExit(Embedder(), rule="threshold", threshold=1, min_answers=min_answers)
    async with RecordingClient(pair[0].url) as client:
        layers = [[agent(client, seed) for seed in range(6)], [agent(client)] * 2, [agent(client)]]
        mixture = MixtureOfAgents(layers, prompt=PROMPT, early_exit=policy)
        result = await mixture.answer(QUESTION)
    first, second = scored
    assert client.logprobs == [first] * 6 + [second] * 2 + [False]
    assert {decision.of for decision in result.decisions} <= ({3, 2} if second else {3})


async def test_layers_have_their_prompts_and_agents_their_roles(
    pair: tuple[EngineClient, EngineClient],
) -> None:
    prompts = [AggregationPrompt("answers-first", f"Layer {n}:", closing="\nEnd.") for n in (2, 3)]
    async with RecordingClient(pair[0].url) as client:
        doubting = replace(agent(client, 1), role="You doubt.")
        layers = [[agent(client), doubting], [agent(client), doubting], [agent(client)]]
        async with MixtureOfAgents(layers, "2x2x1", prompt=prompts).answering(QUESTION) as run:
            pieces = [piece async for piece in run]
            assert len(pieces) > 1 and "".join(pieces) == (await run.result()).text
        systems = [messages[0]["content"] for messages in client.prompts]
    assert sorted(systems[:2]) == sorted([QUESTION, "You doubt."])
    assert {system.partition("\n\n")[0] for system in systems[2:4]} == {"Layer 2:", "You doubt."}
    assert all("Layer 2:" in system and system.endswith("\nEnd.") for system in systems[2:4])
    assert systems[4].startswith("Layer 3:") and "You doubt." not in systems[4]


async def test_free_tokens_need_neither_prefills_nor_the_plugin(
    pair: tuple[EngineClient, EngineClient], plain_engine: LocalEngine
) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    prompt_tokens = (await pair[0].prefill_only(messages=messages)).prompt_tokens
    context = (await pair[0].info()).context_length
    for url in (pair[0].url, plain_engine.url):
        async with RecordingClient(url) as client:
            model = agent(client)
            assert await model.free_tokens(messages, [100, 100]) is None
            assert await model.free_tokens(messages, [100, None]) == context - 12 - prompt_tokens
            assert await agent(client, max_tokens=context).free_tokens(messages, [100]) == 0
            assert await model.fits(messages, 300) and not await model.fits(messages, 20)
            assert client.others == []
