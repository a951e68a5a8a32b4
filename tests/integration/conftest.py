"""Provide models with experts, and the cells of fault tests, which must leave an idle engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path

import httpx
import pytest
from flashmoa_sglang.tiny_model import build

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from tests.integration.baseline import Baseline
from tests.integration.plugin.fault_cells import Cell
from tests.integration.support import EXPERTS


@pytest.fixture(scope="session")
def experts_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text on which the tokenizers of models with experts are trained."""
    file = tmp_path_factory.mktemp("experts") / "text.txt"
    file.write_text("A river runs through the valley. " * 50)
    return file


@pytest.fixture(scope="session")
def experts_model(experts_text: Path) -> Path:
    build(experts_text.parent / "model", [experts_text], EXPERTS, seed=0)
    return experts_text.parent / "model"


@pytest.fixture(scope="module")
async def base(engine: LocalEngine) -> AsyncGenerator[Baseline]:
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as http:
        baseline = Baseline(engine, http)
        await baseline.take()
        yield baseline


@pytest.fixture
async def make(
    engine: LocalEngine, base: Baseline, words: Callable[[int, int], str]
) -> AsyncGenerator[Callable[..., Cell]]:
    """Makes cells; afterwards, the engine must be in the state before them."""
    async with (
        EngineClient(engine.url, timeout=60) as client,
        httpx.AsyncClient(base_url=engine.url, timeout=60) as http,
    ):
        yield partial(Cell, client, http, words)
    await base.wait_until_restored()
