"""Build the command-line parser that all benchmarks have in common, and options of several."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.modelled_gpus import add_device_options


def make_parser(
    name: str, doc: str | None, roles: Sequence[Role] = (), *, repeats: bool = True
) -> argparse.ArgumentParser:
    """Make a parser for ``flashmoa bench NAME`` with the common options.

    Args:
        doc: description of the benchmark, for ``--help``.
        roles: engines that it compares, each with an option for its URL. Without roles, the
            parser gets no options for rounds and engines.
        repeats: whether there are rounds, so that their number is an option.
    """
    parser = argparse.ArgumentParser(
        prog=f"flashmoa bench {name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the results to this file"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random token ids")
    if roles and repeats:
        parser.add_argument(
            "--repeats",
            type=positive,
            default=5,
            help="rounds per measurement; figures are medians over them",
        )
    if roles:
        _add_engine_options(parser, roles)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser, roles: Sequence[Role]) -> None:
    local = parser.add_argument_group("engines on this CPU (the default)")
    local.add_argument(
        "--shape", default="bench", help="shape of the tiny model that the benchmark makes"
    )
    local.add_argument("--core", type=int, default=0, help="CPU core on which the engines run")
    local.add_argument("--cache", type=Path, default=Path(".cache"), help="where models are kept")
    for kind, owners in (("engine", "every engine"), ("plugin", "those with the plugin")):
        local.add_argument(
            f"--{kind}-arguments",
            type=shlex.split,
            default=[],
            metavar="TEXT",
            help=f'more arguments for {owners}: --{kind}-arguments="--flag value"',
        )
    add_device_options(parser)
    running = parser.add_argument_group("running engines instead")
    for role in roles:
        optional = "; optional" if role.optional else ""
        running.add_argument(role.flag, metavar="URL", help=f"{role.description()}{optional}")


def positive(text: str) -> int:
    """Parse a whole number. Raises: argparse.ArgumentTypeError if it is not above 0."""
    number = int(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {number}")
    return number


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
