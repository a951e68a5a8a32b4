"""``flashmoa router``: serve several engines, or a PD pair, at one address.

With --engine, each request goes to the engine that has its prefix cached. With --prefill and
--pd-router, requests may read each other's answers, and their prompts are prefilled while those
answers are written; start a router for each pair.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

from flashmoa.cli.ports import api_url, bind, port_problem
from flashmoa.engine.connections import engine_url
from flashmoa.router.policy import PATIENCE, PrefixAware
from flashmoa.router.saturation import FORWARD_MARGIN

if TYPE_CHECKING:
    from starlette.applications import Starlette

_INSTALL = "pip install 'flashmoa[router]'"


def main(arguments: Sequence[str]) -> int:
    """Serve until stopped. Return the exit status."""
    parser = _make_parser()
    parsed = parser.parse_args(arguments)
    pair = len(parsed.prefill) + len(parsed.pd_router)
    if (pair, len(parsed.prefill)) not in ((0, 0), (2, 1)) or bool(parsed.engine) == bool(pair):
        parser.error("give either --engine, or --prefill and --pd-router, each of these two once")
    if parsed.decode and not pair:
        parser.error("--decode names decode engines of a pair; give --prefill and --pd-router, too")
    if problem := port_problem(parsed.port):
        parser.error(problem)
    try:
        app, backend = _make_application(parsed)
        _raise_file_limit()
        with bind(parsed.host, parsed.port) as listening:
            print(f"flashmoa: {backend} behind {api_url(parsed.host, parsed.port)}", flush=True)
            _serve(app, [listening])
    except ModuleNotFoundError as error:
        print(f"flashmoa router: {error.name} is not installed; run {_INSTALL}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"flashmoa router: {error}", file=sys.stderr)
        return 1
    return 0


def _make_application(parsed: argparse.Namespace) -> tuple[Starlette, str]:
    """Return the application, and a description of the engines behind it.

    Raises: OSError or ValueError if an option is wrong; ModuleNotFoundError.
    """
    from flashmoa.router.application import application
    from flashmoa.router.engines import RouterOptions
    from flashmoa.router.shell.application import ShellOptions, shell_application

    if parsed.prefill:
        options = ShellOptions(
            prefill=engine_url(parsed.prefill[0]),
            pd_router=engine_url(parsed.pd_router[0]),
            decode=[engine_url(url) for url in parsed.decode],
            agent_seconds=parsed.agent_seconds,
            max_body_bytes=parsed.max_body_bytes,
        )
        return shell_application(options), f"the PD pair of {options.prefill}"
    engines = [engine_url(url) for url in parsed.engine]
    options = RouterOptions(
        engines,
        policy=PrefixAware(patience=parsed.patience),
        api_key=parsed.api_key,
        model_config=_read_config(parsed.model_config) if parsed.model_config else None,
        saturation_margin=parsed.saturation,
        max_body_bytes=parsed.max_body_bytes,
    )
    count = len(set(engines))
    return application(options), f"{count} engine{'s' if count > 1 else ''}"


def _read_config(path: Path) -> dict[str, Any]:
    """Return a model's config. Raises: ValueError if the file is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"--model-config {path} is not JSON: {error}") from error


def _raise_file_limit() -> None:
    """Raise the limit of open files to the hard one: a request needs two connections."""
    import resource  # Only POSIX has it.

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # macOS refuses a hard limit that is infinite.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _serve(app: Starlette, sockets: list[socket]) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket] | None = None) -> None:
            # The server waits for its answers to end, and channels do not end by themselves.
            app.state.channels.close()
            await super().shutdown(sockets)

    with suppress(KeyboardInterrupt):
        Server(uvicorn.Config(app, log_level="warning")).run(sockets)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashmoa router",
        description=(__doc__ or "").partition(": ")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=30200, help="port to listen on (%(default)s)")
    about = "the largest body of a request, in bytes (32 MiB)"
    add("--max-body-bytes", type=_number(int, positive=True), default=32 << 20, help=about)
    _add_engine_options(parser.add_argument_group("several engines behind one address"))
    group = parser.add_argument_group("a PD pair behind one address")
    _add_urls(group, "--prefill", "the prefill engine of a PD pair")
    _add_urls(group, "--pd-router", "the pair's own router")
    about = "a decode engine of the pair, to hear what calls write; give it once for each engine"
    _add_urls(group, "--decode", about)
    about = "the most seconds that a request waits for an answer that it reads (%(default)g)"
    group.add_argument(
        "--agent-seconds", type=_number(float, positive=True), default=600.0, help=about
    )
    return parser


def _add_engine_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    _add_urls(group, "--engine", "an engine's URL; give it once for each engine")
    add("--api-key", help="API key for the router's own requests to the engines")
    add("--model-config", type=Path, help="the model's config.json, to count work in FLOPs")
    add(
        "--patience",
        type=_number(float),
        default=PATIENCE,
        help="wait for the engine that has the prefix while the work before the request is less "
        "than this many times the work that the engine saves (%(default)g); 0: never wait",
    )
    add(
        "--saturation",
        type=_number(float),
        default=FORWARD_MARGIN,
        metavar="FORWARDS",
        help="an engine is full when its uncomputed prompts are as much work as this number of its "
        "largest forwards (%(default)g); 0: no limit",
    )


def _add_urls(group: argparse._ArgumentGroup, flag: str, about: str) -> None:
    group.add_argument(flag, action="append", default=[], metavar="URL", help=about)


def _number(kind: type[int] | type[float], *, positive: bool = False) -> Callable[[str], float]:
    """Return a type for arguments that are finite numbers of at least 0, or above 0."""

    def parse(text: str) -> float:
        number = kind(text)
        if not (number > 0 or (number == 0 and not positive)) or math.isinf(number):
            wanted = "above 0" if positive else "of at least 0"
            raise argparse.ArgumentTypeError(
                f"{text} is refused; give a number {wanted} that is finite"
            )
        return number

    parse.__name__ = kind.__name__  # For argparse's message about other texts.
    return parse
