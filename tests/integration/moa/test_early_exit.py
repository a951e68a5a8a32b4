"""Early exit with a real embedding engine, and on a modelled GPU."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from flashmoa.errors import PluginMissing
from flashmoa.moa import AggregationPrompt, EarlyExit, EngineEmbedder, MixtureOfAgents
from flashmoa.moa.early_exit import Embedding, frobenius_cosine, normalise
from tests.integration.moa.agents import QUESTION, agent
from tests.integration.router.conftest import make_options, serve_router
from tests.integration.router.http_calls import metric, post_json
from tests.integration.support import LAG, RIDING, start_special_engine

PROMPT = AggregationPrompt("question-first", "Weigh these:")
# Each answer ends while the next one is still written.
LENGTHS = (40, 100, 300)


async def test_embedding_engine_returns_a_row_per_sentence(
    engines: LocalEngines, model: Path
) -> None:
    """The plugin adds nothing to an embedding engine, so its routes are missing."""
    async with (
        start_special_engine(engines, model, "--is-embedding", has_costs=False) as engine,
        EngineClient(engine.url) as client,
    ):
        with pytest.raises(PluginMissing):
            await client.info()
        embedder = EngineEmbedder(client)
        answers = [
            "The river is wide. It is cold!\nNobody swims.",
            "Go by train.",
            "",
            "Go by train.",
        ]
        embedded = [await embedder.embed(answer) for answer in answers]
        await check_that_a_router_passes_embeddings_on(engine, answers[:2])
    assert [len(rows) for rows in embedded] == [3, 1, 1, 1]
    assert len({rows.shape[1] for rows in embedded}) == 1
    assert all(np.isfinite(rows).all() for rows in embedded)
    river, train, _, again = map(normalise, embedded)
    assert frobenius_cosine(train, again) == pytest.approx(1)
    assert frobenius_cosine(river, train) < 0.999


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
    """An embedder to which no two texts have anything in common, so that no agent is left out."""

    def __init__(self) -> None:
        self.texts = 0

    async def embed(self, text: str) -> Embedding:
        self.texts += 1
        return np.eye(1, 8, self.texts, dtype=np.float32)


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
    assert embedder.texts == 2
    assert max(late) < LAG
    assert answers[0] == answers[1]
