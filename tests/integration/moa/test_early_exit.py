"""Early exit with a real embedding engine, and on a modelled GPU."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
import torch

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from flashmoa.errors import MalformedRequest, PluginMissing, PromptTooLarge
from flashmoa.moa import AggregationPrompt, EarlyExit, EngineEmbedder, MixtureOfAgents
from tests.integration.moa.agents import QUESTION, agent
from tests.integration.router.conftest import make_options, serve_router
from tests.integration.router.http_calls import metric
from tests.integration.support import (
    RIDING,
    post_json,
    start_special_engine,
)
from tests.waiting import LAG

PROMPT = AggregationPrompt("question-first", "Weigh these:")
# Each answer ends while the next one is still written.
LENGTHS = (40, 100, 300)


TEXTS = [
    "The river is wide. It is cold!\nNobody swims in it, because nobody has ever swum there.\n" * 4,
    "Go by train. The station is behind the bridge.",
    "Go",
    "Go by train. The station is behind the bridge.",
]


def cosines_as_published(model: Path, texts: list[str]) -> list[list[float]]:
    """Compute Algorithm 1 as printed (lines 1, 2, 8 and 9), with transformers' hidden states."""
    from flashmoa_sglang.sglang import torchvision_ops

    torchvision_ops.allow_mismatched_build()
    from transformers import AutoModel, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    loaded = AutoModel.from_pretrained(model, dtype=torch.float32)
    matrices: list[Any] = []
    for text in texts:
        with torch.inference_mode():
            states = loaded(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()
        gram = states.T @ states
        lengths = np.sqrt(np.diag(gram))
        correlation = gram / np.outer(lengths, lengths)
        matrices.append(correlation / np.linalg.norm(correlation))
    return [[float((one * other).sum()) for other in matrices] for one in matrices]


async def test_an_embedding_engine_compares_token_states(
    engines: LocalEngines, model: Path
) -> None:
    # Long texts are computed in several forwards.
    arguments = ("--is-embedding", "--chunked-prefill-size", "32")
    async with (
        start_special_engine(engines, model, *arguments, has_costs=False) as engine,
        EngineClient(engine.url, timeout=60) as client,
    ):
        with pytest.raises(PluginMissing):  # It has no other route of the plugin.
            await client.info()
        embedder = EngineEmbedder(client)
        # Cached tokens have no states.
        asked = {"model": "default", "input": TEXTS}
        async with httpx.AsyncClient(base_url=engine.url, timeout=60) as direct:
            await post_json(direct, "/v1/embeddings", asked)
            found = await asyncio.gather(*(embedder.compare(TEXTS) for _ in range(3)))
        expected = await anyio.to_thread.run_sync(cosines_as_published, model, TEXTS)
        for one in found:
            assert np.allclose(one, expected, atol=0.01)
        assert found[0][1][3] == pytest.approx(1) and found[0][0][1] < 0.9
        await check_that_wrong_texts_are_refused(client)
        async with serve_router(make_options(engine)) as router:
            routed = await post_json(router, "/flashmoa/similarities", {"texts": TEXTS[:2]})
        assert np.allclose(routed["similarities"], [row[:2] for row in expected[:2]], atol=0.01)
        await check_that_a_router_passes_embeddings_on(engine, TEXTS[:2])


async def check_that_wrong_texts_are_refused(client: EngineClient) -> None:
    with pytest.raises(MalformedRequest, match="is empty; leave it out"):
        await client.similarities(["Go", ""])
    # The engine has more room for characters than for tokens.
    with pytest.raises(MalformedRequest, match="longer than the model's context length"):
        await client.similarities(["Go", "by train " * 40_000])
    with pytest.raises(PromptTooLarge, match="has 4000000 characters"):
        await client.similarities(["by train " * 444_444 + "Go b"])


async def check_that_a_router_passes_embeddings_on(engine: LocalEngine, texts: list[str]) -> None:
    asked = {"model": "default", "input": texts}
    async with (
        serve_router(make_options(engine)) as router,
        httpx.AsyncClient(base_url=engine.url, timeout=60) as direct,
    ):
        routed, own = [await post_json(to, "/v1/embeddings", asked) for to in (router, direct)]
        assert await metric(router, "flashmoa_router_engine_load{") == 0
    rows = [[one["embedding"] for one in answer["data"]] for answer in (routed, own)]
    assert len(rows[0]) == len(texts) and np.allclose(rows[0], rows[1], atol=1e-3)


class OrthogonalEmbedder:
    """An embedder that finds nothing in common in any two texts, so that no agent is left out."""

    def __init__(self) -> None:
        self.compared = 0

    async def compare(self, texts: Sequence[str]) -> list[list[float]]:
        self.compared += 1
        return np.eye(len(texts)).tolist()


@pytest.mark.slow
async def test_undecided_early_exit_streams_as_much_as_overlap_alone(
    engines: LocalEngines, model: Path
) -> None:
    """All agents share an engine, whose decode steps therefore return log-probabilities."""
    embedder = OrthogonalEmbedder()
    undecided = EarlyExit(embedder, rule="threshold", threshold=1)
    late: list[int] = []
    answers: list[str] = []
    async with (
        start_special_engine(engines, model, environment=RIDING) as engine,
        EngineClient(engine.url, timeout=60) as client,
    ):
        proposers = [agent(client, seed, max_tokens=n) for seed, n in enumerate(LENGTHS)]
        for policy in (None, undecided):
            await client.flush_cache()
            mixture = MixtureOfAgents(
                [proposers, [agent(client)]], prompt=PROMPT, early_exit=policy
            )
            result = await mixture.answer(QUESTION)
            assert [proposer.status for proposer in result.layers[0]] == ["used"] * 3
            usage = result.final.usage
            assert usage is not None and usage.late_tokens is not None
            assert usage.prompt_tokens > sum(LENGTHS)
            late.append(usage.late_tokens)
            answers.append(result.text)
    assert embedder.compared == 1
    assert max(late) < LAG
    assert answers[0] == answers[1]
