"""Make the commands of benchmarks. Each declares its options, its engines and its measurement."""

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
    """Parse a whole number above 0. Raises: argparse.ArgumentTypeError for other numbers."""
    number = int(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {number}")
    return number


def positive_float(text: str) -> float:
    """Parse a number above 0. Raises: argparse.ArgumentTypeError for other numbers."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return number


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a benchmark.

    Attributes:
        name: with dashes for an option, without dashes for a required argument.
        kind: parses a value; ``bool`` makes a flag.
        count: argparse's ``nargs``; by default an option with a list as default takes several.
    """

    name: str
    kind: Callable[[str], Any]
    default: Any = None
    about: str = ""
    choices: Sequence[str] | None = None
    count: int | str | None = None

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        if self.kind is bool:
            parser.add_argument(self.name, action="store_true", help=self.about)
            return
        default: object = self.default
        several = self.count is None and isinstance(default, list)
        parser.add_argument(
            self.name,
            type=self.kind,
            default=self.default,
            nargs="+" if several else self.count,
            choices=self.choices,
            help=self.about,
        )


RESUME = Option(
    "--resume",
    bool,
    about="measure only what is not in the --json file, which is written after each cell",
)


def stock_forwards(*default: int) -> Option:
    """Return the option for more stock engines, with chunks of other sizes.

    Smaller chunks lengthen decode steps less and are less efficient. The best size for stock SGLang
    depends on the load.
    """
    about = (
        "--chunked-prefill-size of further stock engines, with mixed chunks where requests decode "
        "(%(default)s)"
    )
    return Option("--stock-forwards", positive, list(default), about, count="*")


def mixed_roles(sizes: Sequence[int]) -> dict[str, Role]:
    """Return the stock engines of :func:`stock_forwards` with mixed chunks, by way."""
    return {
        f"stock mixed {size}": Role(
            f"stock_mixed_{size}",
            plugin=False,
            arguments=("--enable-mixed-chunk", "--chunked-prefill-size", str(size)),
            optional=True,
        )
        for size in sizes
    }


def command(  # noqa: PLR0913
    name: str,
    doc: str | None,
    measure: Callable[[Report], Awaitable[None]],
    roles: Sequence[Role],
    *options: Option,
    check: Callable[[argparse.Namespace], str | None] | None = None,
    repeats: bool = True,
    defaults: dict[str, Any] | None = None,
) -> Callable[[Sequence[str]], int]:
    """Return the ``main`` of a benchmark, which parses a command line and measures.

    Args:
        doc: description of the benchmark, for ``--help``.
        measure: measures, prints and saves, given a report with the parsed options.
        roles: engines to compare; each gets an option for its URL.
        check: returns an error message for the options, or ``None``.
        repeats: whether the number of rounds is an option.
        defaults: other defaults for common options.
    """

    def main(arguments: Sequence[str]) -> int:
        parser = make_parser(name, doc, roles, *options, repeats=repeats)
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
    name: str, doc: str | None, roles: Sequence[Role], *options: Option, repeats: bool = True
) -> argparse.ArgumentParser:
    """Make a parser for ``flashmoa bench NAME`` with the common options, as :func:`command`."""
    parser = argparse.ArgumentParser(
        prog=f"flashmoa bench {name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = [
        Option("--json", Path, about="also write the results to this file"),
        Option("--seed", int, 0, "seed of the random token ids"),
    ]
    if repeats:
        about = "rounds per measurement; figures are medians over them"
        common.append(Option("--repeats", positive, 5, about))
    for option in (*common, *options):
        option.add_to(parser)
    _add_engine_options(parser, roles)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser, roles: Sequence[Role]) -> None:
    local = parser.add_argument_group("engines on this CPU (the default)")
    local.add_argument(
        "--shape", default="bench", help="shape of the tiny model that the benchmark makes"
    )
    local.add_argument("--core", type=int, default=0, help="CPU core on which the engines run")
    local.add_argument("--cache", type=Path, default=Path(".cache"), help="where models are kept")
    for kind, owners in (("engine", "every engine"), ("plugin", "engines with the plugin")):
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
