"""Test agents on several PD pairs: three pairs of tiny models, each with its shell router."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngines
from flashmoa.engine.tiny_models import tiny_model
from flashmoa.linking.link import Ahead
from flashmoa.moa import AggregationPrompt, MixtureOfAgents, Model, Result
from tests.conftest import GUIDE, ROOT
from tests.integration.engine_costs import known_costs
from tests.integration.moa.agents import QUESTION
from tests.integration.router.http_calls import chat, generation, metric, post_json
from tests.integration.router.pairs import Pair, running_pairs
from tests.integration.support import STRICT, wait_for_streams, wait_until_idle, wait_until_measured

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed"),
]
Words = Callable[[int, int], str]
PROMPT = AggregationPrompt("question-first", "Weigh these answers:")
AHEAD = "flashmoa_shell_ahead_tokens_total"
# The planner's tokens, and those before and after its answer in the critic's prompt.
PLAN, BEFORE, AFTER = 160, 300, 20


@dataclass
class Expected:
    """What plain engines answer: a mixture, and an agent on each that reads the first's plan."""

    mixture: Result
    plan: dict[str, Any]
    critics: dict[str, str]


@pytest.fixture(scope="module")
def models(model: Path, experts_text: Path) -> dict[str, Path]:
    """Three models; the medium one has the small one's tokenizer, and the large one another."""
    cache = ROOT / ".cache" / "models"
    medium, large = tiny_model("small", [GUIDE], cache), tiny_model("test", [experts_text], cache)
    return {"small": model, "medium": medium, "large": large}


@pytest.fixture(scope="module")
async def expected(engines: LocalEngines, models: dict[str, Path], words: Words) -> Expected:
    async with AsyncExitStack() as stack:
        clients: dict[str, EngineClient] = {}
        http: dict[str, httpx.AsyncClient] = {}
        for core, (name, model) in enumerate(models.items()):
            engine = await engines.start(
                model,
                core=core % 2,
                arguments=["--max-total-tokens", "12000"],
                environment={**STRICT, **known_costs(models["small"])},
            )
            stack.push_async_callback(engine.stop)
            await wait_until_measured(engine)
            clients[name] = await stack.enter_async_context(EngineClient(engine.url))
            connected = httpx.AsyncClient(base_url=engine.url, timeout=120)
            http[name] = await stack.enter_async_context(connected)
        result = await mixture(clients, "nothing").answer(QUESTION)
        plan = await post_json(http["small"], "/generate", planner(words))
        critics: dict[str, str] = {}
        for name, client in http.items():
            answer = await post_json(client, "/v1/chat/completions", critic(words, plan["text"]))
            critics[name] = text_of(answer)
    return Expected(result, plan, critics)


@pytest.fixture(scope="module")
async def pairs(
    engines: LocalEngines, models: dict[str, Path], expected: Expected
) -> AsyncGenerator[dict[str, Pair]]:
    async with running_pairs(engines, models, models["small"]) as running:
        yield running


def mixture(engines: Mapping[str, EngineClient], ahead: Ahead) -> MixtureOfAgents:
    def agents(*names: str) -> list[Model]:
        sampling = {"temperature": 0, "max_tokens": 150, "ignore_eos": True}
        return [Model(engines[name], sampling=sampling) for name in names]

    layers = [agents("small", "medium", "large", "small"), agents("medium", "large")]
    return MixtureOfAgents([*layers, agents("large")], "4-2-1", prompt=PROMPT, ahead=ahead)


def planner(words: Words) -> dict[str, Any]:
    return generation(words(200, 2400), tokens=PLAN)


def critic(words: Words, answer: str) -> dict[str, Any]:
    return chat(f"{words(BEFORE, 2401)}{answer}{words(AFTER, 2402)}")


def critic_reading(words: Words, agent: str) -> dict[str, Any]:
    before, after = words(BEFORE, 2401), words(AFTER, 2402)
    content = [
        {"type": "text", "text": before},
        {"type": "agent", "agent": agent},
        {"type": "text", "text": after},
    ]
    return chat(content, workflow="7")


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


async def flush(pairs: Mapping[str, Pair]) -> None:
    for pair in pairs.values():
        for engine in (pair.prefill, pair.decode):
            async with EngineClient(engine.url) as client:
                await client.flush_cache()


async def transferred(pairs: Mapping[str, Pair]) -> dict[str, float]:
    """Return how many tokens' KV each pair has transferred so far."""
    return {
        name: await pair.transferred_bytes() / pair.bytes_per_token for name, pair in pairs.items()
    }


async def test_mixture_over_three_pairs_equals_one_over_plain_engines(
    pairs: dict[str, Pair], expected: Expected
) -> None:
    """To a mixture, each shell router is an engine. It streams texts from one to the other itself,
    as prompt streams on the prefill engines, and the shells keep no agent's answer."""
    kept = await metric(pairs["small"].shell, "flashmoa_shell_agents")
    cached: dict[Ahead, int] = {}
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(EngineClient(str(pair.shell.base_url)))
            for name, pair in pairs.items()
        }
        ways: list[Ahead] = ["nothing", "text"]
        for ahead in ways:
            await flush(pairs)
            before = await transferred(pairs)
            result = await mixture(clients, ahead).answer(QUESTION)
            assert texts_by_layer(result) == texts_by_layer(expected.mixture)
            assert {agent.status for agent in result.agents} == {"used"}
            cached[ahead] = count_cached(result.layers[1:])
            # Every request's prompt is transferred once, and no increment.
            after = await transferred(pairs)
            for name, client in clients.items():
                prompts = sum(
                    agent.usage.prompt_tokens
                    for agent in result.agents
                    if agent.engine == client.url and agent.usage is not None
                )
                assert after[name] - before[name] == pytest.approx(prompts)
    # Each of three aggregators reads 300 tokens of answers, of which the last ones may come late.
    assert cached["text"] > cached["nothing"] + 3 * 100
    for pair in pairs.values():
        assert await metric(pair.shell, "flashmoa_shell_agents") == kept
        async with EngineClient(pair.prefill.url) as prefill:
            await wait_until_idle(prefill)


def texts_by_layer(result: Result) -> list[list[str]]:
    return [[agent.text for agent in layer] for layer in result.layers]


def count_cached(layers: Sequence[Sequence[Any]]) -> int:
    return sum(agent.usage.cached_tokens or 0 for layer in layers for agent in layer)


async def test_answer_written_by_one_pair_is_read_by_the_others(
    pairs: dict[str, Pair], expected: Expected, words: Words
) -> None:
    await flush(pairs)
    before = await transferred(pairs)
    answers: dict[str, dict[str, Any]] = {}

    async def ask(name: str) -> None:
        body = critic_reading(words, "planner")
        answers[name] = await post_json(pairs[name].shell, "/v1/chat/completions", body)

    async with anyio.create_task_group() as group:
        for name in pairs:
            group.start_soon(ask, name)
        for pair in pairs.values():
            async with EngineClient(pair.prefill.url) as prefill:
                await wait_for_streams(prefill)
        plan = planner(words) | {"workflow": "7", "agent": "planner"}
        written = await post_json(pairs["small"].shell, "/generate", plan)
    assert written["output_ids"] == expected.plan["output_ids"]
    assert {name: text_of(answer) for name, answer in answers.items()} == expected.critics
    after = await transferred(pairs)
    for name, pair in pairs.items():
        own = written["meta_info"]["prompt_tokens"] if name == "small" else 0
        prompt = answers[name]["usage"]["prompt_tokens"]
        assert after[name] - before[name] == pytest.approx(own + prompt)
        assert await metric(pair.shell, AHEAD) > BEFORE


async def test_tokens_cross_between_pairs_with_one_tokenizer_only(
    pairs: dict[str, Pair], words: Words
) -> None:
    plan = planner(words) | {"workflow": "8", "agent": "planner"}
    written = await post_json(pairs["small"].shell, "/generate", plan)
    async with EngineClient(pairs["medium"].prefill.url) as medium:
        [before] = await medium.tokenize([words(BEFORE, 2401)])
    ask = generation("", 8) | {"prompt": [{"input_ids": before}, {"agent": "planner"}]}
    del ask["text"]
    answer = await post_json(pairs["medium"].shell, "/generate", ask | {"workflow": "8"})
    whole = generation("", 8) | {"input_ids": before + written["output_ids"]}
    del whole["text"]
    direct = await post_json(pairs["medium"].shell, "/generate", whole)
    assert answer["output_ids"] == direct["output_ids"]
    refused = await pairs["large"].shell.post("/generate", json=ask | {"workflow": "8"})
    assert refused.status_code == 424
    assert "planner's tokens are of another tokenizer" in refused.json()["error"]["message"]
