"""Print, at the end of all tests, how the calls that could be linked found their prompts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.integration.autogen.exactness import as_rows


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = as_rows()
    if not rows:
        return
    terminalreporter.section("linkable calls by how their prompts were found")
    for row in rows:
        kind, *numbers = row.values()
        named = zip(list(row)[1:], numbers, strict=True)
        line = f"{kind!s:<40}" + "".join(f"{name} {number:<6}" for name, number in named)
        terminalreporter.write_line(line)
    # FLASHMOA_EXACTNESS names a file to write them to.
    if path := os.environ.get("FLASHMOA_EXACTNESS"):
        Path(path).write_text(json.dumps(rows, indent=1) + "\n")
