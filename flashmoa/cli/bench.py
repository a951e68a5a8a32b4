"""``flashmoa bench`` and ``flashmoa plan``, if the package ``flashmoa-bench`` is installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

_PACKAGE = "flashmoa_bench"


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench`` and return its exit status; see :func:`plan`."""
    return _run("bench", "cli", arguments)


def plan(arguments: Sequence[str]) -> int:
    """Run ``flashmoa plan`` and return its exit status.

    If the package is not installed, print how to install it and return 1.
    """
    return _run("plan", "plan.command", arguments)


def _run(command: str, module: str, arguments: Sequence[str]) -> int:
    if find_spec(_PACKAGE) is None:
        print(
            f"flashmoa {command} needs the package flashmoa-bench: pip install ./benchmarks",
            file=sys.stderr,
        )
        return 1
    return int(import_module(f"{_PACKAGE}.{module}").main(arguments))
