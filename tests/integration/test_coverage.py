"""Test that agents of every framework are linked as `docs/coverage.md` says."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from tests.conftest import ROOT
from tests.coverage.__main__ import FRAMEWORKS, measure_all, table

# A call may be late on a busy machine.
MAX_LATE_CALLS = 1


def linked_calls(lines: Iterable[str]) -> dict[str, list[int]]:
    """Return the linked calls in each run of a row, by its framework and composition."""
    rows = (re.match(r"\| (.+? \| .+?) \|((?: \d* ?(?:of \d+ )?\|)+)", line) for line in lines)
    return {
        row[1]: [int(count) for count in re.findall(r"(\d+) of", row[2])] for row in rows if row
    }


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_calls_are_linked_as_published() -> None:
    rows = await measure_all([*FRAMEWORKS], at_once=1)
    assert not [row for row in rows if not row.get("same")], "failed, or answered otherwise linked"
    found = linked_calls(table(rows))
    published = linked_calls((ROOT / "docs" / "coverage.md").read_text().splitlines())
    assert found.keys() == published.keys()
    fewer = {
        name: (found[name], counts)
        for name, counts in published.items()
        if any(x < y - MAX_LATE_CALLS for x, y in zip(found[name], counts, strict=True))
    }
    assert not fewer, "fewer calls are linked than published"
