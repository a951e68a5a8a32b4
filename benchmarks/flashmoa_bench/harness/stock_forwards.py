"""Further stock engines for a comparison: with mixed chunks of several sizes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from flashmoa_bench.harness.command_line import positive
from flashmoa_bench.harness.engines import Role


def add_stock_forwards(parser: argparse.ArgumentParser, default: list[int]) -> None:
    """Add an option for further stock engines, with mixed chunks of other sizes.

    Smaller chunks lengthen decode steps less and are less efficient; which size is the best for
    stock SGLang depends on the load.
    """
    parser.add_argument(
        "--stock-forwards",
        type=positive,
        nargs="*",
        default=default,
        metavar="TOKENS",
        help="--chunked-prefill-size of further stock engines with mixed chunks (%(default)s)",
    )


def mixed_roles(sizes: Sequence[int], *arguments: str) -> dict[str, Role]:
    """Return the stock engines of :func:`add_stock_forwards` by the names of their ways.

    Args: arguments: further arguments of these engines.
    """
    return {
        f"stock mixed {size}": Role(
            f"stock_mixed_{size}",
            plugin=False,
            arguments=("--enable-mixed-chunk", "--chunked-prefill-size", str(size), *arguments),
            optional=True,
        )
        for size in sizes
    }
