"""Read what an earlier run of a benchmark has measured, so that it need not be measured again."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flashmoa.engine import EngineError


def measured_cells(
    file: Path, settings: Mapping[str, Any], free: Collection[str]
) -> list[dict[str, Any]]:
    """Return the cells in the JSON file of an earlier run; none if there is no file.

    Args:
        settings: this run's options, as the file has them.
        free: options that may differ between the two runs.

    Raises: EngineError if the file is of a run with other options, or none of this benchmark.
    """
    if not file.exists():
        return []
    document = json.loads(file.read_text())
    try:
        earlier, cells = document["settings"], document["results"]["cells"]
    except (KeyError, TypeError) as error:
        raise EngineError(f"--resume: {file} holds no cells of this benchmark") from error
    names = (earlier.keys() | settings.keys()) - set(free)
    if other := sorted(name for name in names if earlier.get(name) != settings.get(name)):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in other)
        raise EngineError(f"--resume: {file} is of a run with other {options}: give another --json")
    return cells
