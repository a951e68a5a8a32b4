"""What the tests of faults start from: an idle engine, and the proof that it is so again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial

import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine

from .baseline import Baseline
from .fault_cells import Cell


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
    """Makes cells; when they are over, the engine must be as it was."""
    async with (
        EngineClient(engine.url, timeout=60) as client,
        httpx.AsyncClient(base_url=engine.url, timeout=60) as http,
    ):
        yield partial(Cell, client, http, words)
    await base.restored()
