"""Read questions with known answers from files in the form in which their authors publish them.

Nothing is downloaded; users provide the files. The five datasets are those of Faster-MoA §5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from flashmoa_bench.datasets import instructions, mathematics, multiple_choice
from flashmoa_bench.datasets.files import Item, PublishedRow, read_rows

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
    """Return the questions of a dataset's file (JSONL or Parquet), in the file's order.

    Everything that scoring needs is checked here, before any question is asked.

    Raises: ValueError if the dataset is unknown, the file cannot be read or a field is missing;
        ModuleNotFoundError, with a message that says what to install, if a package is missing.
    """
    if name not in _READERS:
        raise ValueError(f"there is no dataset {name!r}: {', '.join(NAMES)}")
    return [_READERS[name](row) for row in read_rows(file)]
