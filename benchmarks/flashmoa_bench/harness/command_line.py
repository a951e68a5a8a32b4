"""What every benchmark takes on the command line."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from flashmoa_bench.harness.engines import Role

_RAW = argparse.RawDescriptionHelpFormatter


def command_line(
    name: str, doc: str | None, roles: Sequence[Role] = (), repeats: int = 5
) -> argparse.ArgumentParser:
    """Make a parser for ``flashmoa bench NAME`` with the common arguments.

    Args:
        doc: the benchmark's own description.
        roles: the engines it needs; each can be given as a URL.
        repeats: rounds per measurement unless ``--repeats`` says otherwise.
    """
    parser = argparse.ArgumentParser(
        prog=f"flashmoa bench {name}", description=doc, formatter_class=_RAW
    )
    parser.add_argument("--repeats", type=positive, default=repeats, help="rounds; medians count")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument("--seed", type=int, default=0, help="of the random token ids")
    own = parser.add_argument_group("engines on this CPU (the default)")
    own.add_argument("--shape", default="bench", help="of the tiny model made for it")
    own.add_argument("--core", type=int, default=0, help="the engines' core")
    own.add_argument("--cache", type=Path, default=Path(".cache"), help="where models are kept")
    if roles:
        _add_engines(parser, own, roles)
    return parser


def _add_engines(
    parser: argparse.ArgumentParser, own: argparse._ArgumentGroup, roles: Sequence[Role]
) -> None:
    for kind, whose in (("engine", "every engine"), ("plugin", "those with the plugin")):
        own.add_argument(
            f"--{kind}-arguments",
            type=shlex.split,
            default=[],
            metavar="TEXT",
            help=f'more arguments for {whose}: --{kind}-arguments="--flag value"',
        )
    running = parser.add_argument_group("running engines instead")
    for role in roles:
        left_out = "; may be left out" if role.optional else ""
        running.add_argument(role.flag, metavar="URL", help=f"{role.description()}{left_out}")


def positive(text: str) -> int:
    """Parse a whole number above 0."""
    number = int(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {number}")
    return number
