"""``flashmoa bench``: the benchmarks of the package ``flashmoa-bench``, if it is installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

_PACKAGE = "flashmoa_bench"
_MISSING = "flashmoa bench needs the package flashmoa-bench: pip install ./benchmarks"


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa_bench.cli.main`` and return its exit status.

    If the package is not installed, print how to install it and return 1.
    """
    if find_spec(_PACKAGE) is None:
        print(_MISSING, file=sys.stderr)
        return 1
    return int(import_module(f"{_PACKAGE}.cli").main(arguments))
