"""Makes a folder completely or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(out: Path) -> Generator[Path]:
    """Yield a path to make a folder at, then rename the folder to ``out``.

    If another process has made ``out`` meanwhile, its folder stays.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.") as scratch:
        made = Path(scratch, out.name)
        yield made
        try:
            made.rename(out)
        except OSError:
            if not out.is_dir():
                raise
