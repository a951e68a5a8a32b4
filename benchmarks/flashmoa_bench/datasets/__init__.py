"""Questions with known answers, from files as their authors publish them.

Nothing is downloaded: a file is the user's. The five are those of Faster-MoA §5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from flashmoa_bench.datasets import instructions, mathematics, multiple_choice
from flashmoa_bench.datasets.files import Item, PublishedRow, rows

__all__ = ["NAMES", "Item", "load"]

_READERS: Mapping[str, Callable[[PublishedRow], Item]] = {
    "gsm8k": mathematics.read_gsm8k,
    "math-500": mathematics.read_math,
    "aime25": mathematics.read_aime,
    "mmlu-prox-lite": multiple_choice.read,
    "ifbench": instructions.read,
    "ifbench-strict": partial(instructions.read, loosely=False),
}
NAMES: tuple[str, ...] = tuple(_READERS)


def load(name: str, file: Path) -> list[Item]:
    """Return the questions of a dataset's file (JSONL or Parquet), in its order.

    Everything that scoring needs is checked here, not after a run.

    Raises: ValueError where the dataset is unknown, the file cannot be read or a field is missing;
        ModuleNotFoundError where a package is missing; says which to install.
    """
    if name not in _READERS:
        raise ValueError(f"there is no dataset {name!r}: {', '.join(NAMES)}")
    return [_READERS[name](row) for row in rows(file)]
