"""Provide the two engines, which run in the main environment and are given by their URLs."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest

from flashmoa.engine import EngineClient
from tests.event_loop import no_unhandled_errors, unhandled_errors  # noqa: F401
from tests.integration.openai.programs import Clients, open_clients

URLS = os.environ.get("FLASHMOA_ENGINES", "").split()
# The Responses API of SGLang takes no other name.
MODEL = os.environ.get("FLASHMOA_MODEL", "")


@pytest.fixture(scope="session")
def guide() -> str:
    return (Path(__file__).parents[2] / "examples" / "guides" / "nepal.md").read_text()


@pytest.fixture
async def clients() -> AsyncGenerator[Clients]:
    """One client for each engine; in the end both engines must be idle."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(EngineClient(url)) for url in URLS]
        for engine in engines:
            await engine.flush_cache()
        yield await stack.enter_async_context(open_clients(*URLS))
        with anyio.fail_after(30):
            for engine in engines:
                while (await engine.info()).prompt_streams:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
