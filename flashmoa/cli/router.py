"""``flashmoa router``: serve several engines, or a PD pair, at one address.

With --engine, each request is sent to an engine that has its prefix cached. With --prefill and
--pd-router, requests may read each other's answers, and their prompts are prefilled while these
answers are written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmoa.cli.ports import port_problem
from flashmoa.engine import engine_url

if TYPE_CHECKING:
    from flashmoa.router.application import RouterOptions
    from flashmoa.router.shell.application import ShellOptions

POLICIES = ("prefix_aware", "cache_aware", "round_robin", "random")


def main(arguments: Sequence[str]) -> int:
    """Serve until stopped. Return the exit status."""
    parser = _make_parser()
    parsed = parser.parse_args(arguments)
    if bool(parsed.pd_router) != bool(parsed.prefill) or bool(parsed.engine) == bool(
        parsed.prefill
    ):
        parser.error("give either --engine, or --prefill and --pd-router")
    if problem := port_problem(parsed.port):
        parser.error(problem)
    try:
        import uvicorn

        from flashmoa.router.application import application
        from flashmoa.router.shell.application import shell_application
    except ModuleNotFoundError as error:
        print(f"flashmoa router: {error.name} is not installed; run {_INSTALL}", file=sys.stderr)
        return 1
    try:
        if parsed.pd_router:
            app, backend = shell_application(_make_shell_options(parsed)), "a PD pair"
        else:
            app = application(_make_router_options(parsed))
            backend = f"{len(parsed.engine)} engines"
    except (OSError, ValueError) as error:
        print(f"flashmoa router: {error}", file=sys.stderr)
        return 1
    print(f"flashmoa: {backend} behind http://{parsed.host}:{parsed.port}/v1", flush=True)
    uvicorn.run(app, host=parsed.host, port=parsed.port, log_level="warning")
    return 0


_TOKENIZE = {"auto": None, "always": True, "never": False}
_INSTALL = "pip install 'flashmoa[router]'"
_DESCRIPTION = """\
Put several engines, or a PD pair, behind one address.

With --engine, each request goes to the engine that has its prefix cached. With --prefill and
--pd-router, requests may read each other's answers, and their prompts are prefilled while
those answers are written."""


def _make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="flashmoa router", description=_DESCRIPTION, formatter_class=raw
    )
    add = parser.add_argument
    add(
        "--engine",
        action="append",
        default=[],
        metavar="URL",
        help="an engine's URL; give it once for each engine",
    )
    add("--prefill", metavar="URL", help="the prefill engine of a PD pair")
    add("--pd-router", metavar="URL", help="the pair's own router")
    add(
        "--agent-seconds",
        type=float,
        default=600.0,
        help="with --prefill: the most seconds that a request waits for an answer that it reads "
        "(%(default)g)",
    )
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=30200, help="port to listen on (%(default)s)")
    add(
        "--policy",
        choices=POLICIES,
        default=POLICIES[0],
        help="how engines are chosen (%(default)s)",
    )
    add(
        "--patience",
        type=float,
        default=8.0,
        help="wait for the engine that has the prefix while the work before the request is less "
        "than this many times the work that the engine saves (%(default)g); 0: never wait",
    )
    add(
        "--saturation",
        type=float,
        default=1.2,
        metavar="FORWARDS",
        help="forwards of work at which an engine counts as full (%(default)g); 0: no limit",
    )
    add("--model-config", type=Path, help="the model's config.json, to count work in FLOPs")
    add("--api-key", help="API key for the router's own requests to the engines")
    add(
        "--tokenize",
        choices=tuple(_TOKENIZE),
        default="auto",
        help="whether to ask engines for the tokens of prompts; auto: if engines publish KV events",
    )
    add(
        "--max-body-bytes",
        type=int,
        default=32 << 20,
        help="the largest body of a request, in bytes (32 MiB)",
    )
    add(
        "--max-waiting",
        type=int,
        default=10_000,
        help="the most requests that wait for an engine (%(default)s)",
    )
    add(
        "--hung-seconds",
        type=float,
        default=40.0,
        help="seconds until an engine that accepts connections but does not answer counts as gone "
        "(%(default)g)",
    )
    return parser


def _make_router_options(parsed: argparse.Namespace) -> RouterOptions:
    from flashmoa.router.application import RouterOptions
    from flashmoa.router.policies import CacheAware, Random, RoundRobin
    from flashmoa.router.prefix_aware import PrefixAware

    policies = {
        "prefix_aware": lambda: PrefixAware(patience=parsed.patience),
        "cache_aware": CacheAware,
        "round_robin": RoundRobin,
        "random": Random,
    }
    config: Path | None = parsed.model_config
    return RouterOptions(
        engines=[engine_url(url) for url in parsed.engine],
        policy=policies[parsed.policy](),
        api_key=parsed.api_key,
        model_config=_read_config(config) if config else None,
        saturation_margin=parsed.saturation,
        tokenize=_TOKENIZE[parsed.tokenize],
        max_body_bytes=parsed.max_body_bytes,
        max_waiting=parsed.max_waiting,
        hung_seconds=parsed.hung_seconds,
    )


def _read_config(path: Path) -> dict[str, Any]:
    """Return a model's config. Raises: ValueError if the file is not JSON."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"--model-config {path} is not JSON: {error}") from error


def _make_shell_options(parsed: argparse.Namespace) -> ShellOptions:
    from flashmoa.router.shell.application import ShellOptions

    return ShellOptions(
        prefill=engine_url(parsed.prefill),
        pd_router=engine_url(parsed.pd_router),
        agent_seconds=parsed.agent_seconds,
        max_body_bytes=parsed.max_body_bytes,
    )
