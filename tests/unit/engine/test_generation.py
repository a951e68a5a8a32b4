"""Test reading streamed answers as an engine sends them."""

from __future__ import annotations

import pytest

from flashmoa import EngineClient
from tests.unit.engine.faulty_engine import TEXT, faulty_engine

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_only_line_feeds_end_the_lines_of_events() -> None:
    """U+2028 ends a line for Python, but not in an event."""
    async with (
        faulty_engine() as engine,
        EngineClient(engine.url) as client,
        client.chat([{"role": "user", "content": "Go."}]) as deltas,
    ):
        assert "".join([delta.text async for delta in deltas]) == TEXT
