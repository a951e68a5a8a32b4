"""Connect clients, and print at the end of the tests how exact links were."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from flashmoa.engine.local import LocalEngine
from tests.integration.frameworks.autogen.runs import Client, as_rows, connected


@pytest.fixture
async def model_client(engine: LocalEngine) -> AsyncGenerator[Client]:
    async with connected(engine) as (client,):
        yield client


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = as_rows()
    if not rows:
        return
    terminalreporter.section("linkable calls by how their prompts were found")
    for row in rows:
        kind, *numbers = row.values()
        counts = zip(list(row)[1:], numbers, strict=True)
        line = f"{kind!s:<40}" + "".join(f"{name} {number:<6}" for name, number in counts)
        terminalreporter.write_line(line)
    # ``make exactness`` keeps the counts.
    if path := os.environ.get("FLASHMOA_EXACTNESS"):
        Path(path).write_text(json.dumps(rows, indent=1) + "\n")
