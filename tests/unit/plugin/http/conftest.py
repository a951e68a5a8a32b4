"""A table of prompt streams on a fake engine."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from flashmoa_sglang.http.streams import StreamTable

from tests.unit.plugin.http.fakes import FakeEngine


@pytest.fixture
async def engine() -> Any:
    return FakeEngine()


@pytest.fixture
async def table(engine: Any) -> AsyncGenerator[StreamTable]:
    table = StreamTable(engine)
    yield table
    for stream in list(table._open.values()):
        table.close(stream, "deleted")
