"""Test that agents of every framework are linked as `docs/coverage.md` says."""

import re
from collections.abc import Iterable

import pytest

from tests.conftest import ROOT
from tests.coverage.__main__ import FRAMEWORKS, measure_all, table

# A call may be late on a busy machine.
MAX_LATE_CALLS = 1


def linked_calls(lines: Iterable[str]) -> dict[str, list[int]]:
    """Return the linked calls in each run of a row, by its framework and composition.

    How many texts were streamed depends on how busy the machine is.
    """
    found: dict[str, list[int]] = {}
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        counts = [cells[place] for place in (2, 3, 5, 6) if place < len(cells)]
        if any(re.fullmatch(r"\d+ of \d+", cell) for cell in counts):
            found[f"{cells[0]}: {cells[1]}"] = [int(cell.split()[0]) for cell in counts if cell]
    return found


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
