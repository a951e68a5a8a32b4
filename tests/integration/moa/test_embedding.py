"""Test embeddings of answers with a real embedding engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashmoa.engine import EngineClient, PluginMissing
from flashmoa.engine.local import LocalEngines
from flashmoa.moa import EngineEmbedder
from flashmoa.moa.early_exit import frobenius_cosine, normalise
from tests.integration.support import start_special_engine

pytestmark = pytest.mark.anyio


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
    assert [len(rows) for rows in embedded] == [3, 1, 1, 1]
    assert len({rows.shape[1] for rows in embedded}) == 1
    assert all(np.isfinite(rows).all() for rows in embedded)
    river, train, _, again = map(normalise, embedded)
    assert frobenius_cosine(train, again) == pytest.approx(1)
    assert frobenius_cosine(river, train) < 0.999
