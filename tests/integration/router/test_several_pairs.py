"""Test a mixture over three PD pairs of tiny models, each with its shell router."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngines, tiny_model, wait_for_costs
from flashmoa.link.link import Ahead
from flashmoa.moa import AggregationPrompt, MixtureOfAgents, Model, Result
from tests.conftest import GUIDE, ROOT
from tests.integration.engine_costs import known_costs
from tests.integration.moa.agents import QUESTION
from tests.integration.router.pairs import Pair, running_pairs
from tests.integration.support import STRICT, wait_until_idle

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed"),
]
PROMPT = AggregationPrompt("question-first", "Weigh these answers:")


@pytest.fixture(scope="module")
def models(model: Path, experts_text: Path) -> dict[str, Path]:
    """Three models; the medium one has the small one's tokenizer, and the large one another."""
    cache = ROOT / ".cache" / "models"
    medium, large = tiny_model("small", [GUIDE], cache), tiny_model("test", [experts_text], cache)
    return {"small": model, "medium": medium, "large": large}


@pytest.fixture(scope="module")
async def expected(engines: LocalEngines, models: dict[str, Path]) -> Result:
    """What plain engines answer."""
    async with AsyncExitStack() as stack:
        clients: dict[str, EngineClient] = {}
        for core, (name, model) in enumerate(models.items()):
            engine = await engines.start(
                model,
                core=core % 2,
                arguments=["--max-total-tokens", "12000"],
                environment={**STRICT, **known_costs(models["small"])},
            )
            stack.push_async_callback(engine.stop)
            assert (await wait_for_costs(engine.url)).costs
            clients[name] = await stack.enter_async_context(EngineClient(engine.url))
        return await mixture(clients, "nothing").answer(QUESTION)


@pytest.fixture(scope="module")
async def pairs(
    engines: LocalEngines, models: dict[str, Path], expected: Result
) -> AsyncGenerator[dict[str, Pair]]:
    async with running_pairs(engines, models, models["small"]) as running:
        yield running


def mixture(engines: Mapping[str, EngineClient], ahead: Ahead) -> MixtureOfAgents:
    def agents(*names: str) -> list[Model]:
        sampling = {"temperature": 0, "max_tokens": 150, "ignore_eos": True}
        return [Model(engines[name], sampling=sampling) for name in names]

    layers = [agents("small", "medium", "large", "small"), agents("medium", "large")]
    return MixtureOfAgents([*layers, agents("large")], "4-2-1", prompt=PROMPT, ahead=ahead)


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
    pairs: dict[str, Pair], expected: Result
) -> None:
    """To a mixture, each shell router is an engine. It streams texts from one to the other itself,
    as prompt streams on the prefill engines."""
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
            assert texts_by_layer(result) == texts_by_layer(expected)
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
    # Each of three aggregators reads 300 tokens of answers. The last tokens may come late.
    assert cached["text"] > cached["nothing"] + 3 * 100
    for pair in pairs.values():
        async with EngineClient(pair.prefill.url) as prefill:
            await wait_until_idle(prefill)


def texts_by_layer(result: Result) -> list[list[str]]:
    return [[agent.text for agent in layer] for layer in result.layers]


def count_cached(layers: Sequence[Sequence[Any]]) -> int:
    return sum(agent.usage.cached_tokens or 0 for layer in layers for agent in layer)
