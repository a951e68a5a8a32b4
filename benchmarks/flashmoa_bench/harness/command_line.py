"""Make the commands of benchmarks: each declares its options, its engines and what it measures."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.modelled_gpus import add_device_options
from flashmoa_bench.harness.report import Report


def positive(text: str) -> int:
    """Parse a whole number. Raises: argparse.ArgumentTypeError if it is not above 0."""
    number = int(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {number}")
    return number


def positive_float(text: str) -> float:
    """Parse a number. Raises: argparse.ArgumentTypeError if it is not above 0."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return number


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a benchmark.

    Attributes:
        name: with its dashes; without them, it is an argument that must be given.
        kind: parses a value; ``bool`` for an option without one.
        count: number of values, as argparse's ``nargs``; those with a default list take several.
    """

    name: str
    kind: Callable[[str], Any]
    default: Any = None
    about: str = ""
    choices: Sequence[str] | None = None
    count: int | str | None = None

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the option to a parser."""
        if self.kind is bool:
            parser.add_argument(self.name, action="store_true", help=self.about)
            return
        parser.add_argument(
            self.name,
            type=self.kind,
            default=self.default,
            nargs=self._nargs,
            choices=self.choices,
            help=self.about,
        )

    @property
    def _nargs(self) -> int | str | None:
        several = self.count is None and isinstance(self.default, list)
        return "+" if several else self.count


RESUME = Option(
    "--resume",
    bool,
    about="measure only what is not in the --json file, which is written after each cell",
)


def stock_forwards(*default: int) -> Option:
    """Return an option for further stock engines, with mixed chunks of other sizes.

    Smaller chunks lengthen decode steps less and are less efficient; which size is the best for
    stock SGLang depends on the load.
    """
    about = "--chunked-prefill-size of further stock engines with mixed chunks (%(default)s)"
    return Option("--stock-forwards", positive, list(default), about, count="*")


def mixed_roles(sizes: Sequence[int], *arguments: str) -> dict[str, Role]:
    """Return the stock engines of :func:`stock_forwards` by the names of their ways.

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


def command(  # noqa: PLR0913
    name: str,
    doc: str | None,
    measure: Callable[[Report], Awaitable[None]],
    roles: Sequence[Role] = (),
    options: Sequence[Option] = (),
    *,
    check: Callable[[argparse.Namespace], str | None] | None = None,
    repeats: bool = True,
    defaults: dict[str, Any] | None = None,
) -> Callable[[Sequence[str]], int]:
    """Return the ``main`` of a benchmark, which parses a command line and measures.

    Args:
        measure: measures, prints and saves; the report has the options.
        check: returns what is wrong with the options, ``None`` if nothing is.
        defaults: other defaults of the common options.

    The other arguments are those of :func:`make_parser`.
    """

    def main(arguments: Sequence[str]) -> int:
        parser = make_parser(name, doc, roles, options, repeats=repeats)
        parser.set_defaults(**(defaults or {}))
        chosen = parser.parse_args(arguments)
        if getattr(chosen, "resume", False) and not chosen.json:
            parser.error("--resume needs the --json FILE of the run to resume")
        if check is not None and (problem := check(chosen)):
            parser.error(problem)
        anyio.run(measure, Report(name, chosen))
        return 0

    return main


def make_parser(
    name: str,
    doc: str | None,
    roles: Sequence[Role] = (),
    options: Sequence[Option] = (),
    *,
    repeats: bool = True,
) -> argparse.ArgumentParser:
    """Make a parser for ``flashmoa bench NAME`` with the common options.

    Args:
        doc: description of the benchmark, for ``--help``.
        roles: engines that it compares, each with an option for its URL. Without roles, the
            parser gets no options for rounds and engines.
        options: its own options.
        repeats: whether there are rounds, so that their number is an option.
    """
    parser = argparse.ArgumentParser(
        prog=f"flashmoa bench {name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = [
        Option("--json", Path, about="also write the results to this file"),
        Option("--seed", int, 0, "seed of the random token ids"),
    ]
    if roles and repeats:
        about = "rounds per measurement; figures are medians over them"
        common.append(Option("--repeats", positive, 5, about))
    for option in (*common, *options):
        option.add_to(parser)
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
