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
from typing import TYPE_CHECKING

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


def _make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="flashmoa router", description=__doc__, formatter_class=raw
    )
    parser.add_argument(
        "--engine", action="append", default=[], metavar="URL", help="give it once per engine"
    )
    parser.add_argument("--prefill", metavar="URL", help="the prefill engine of a PD pair")
    parser.add_argument("--pd-router", metavar="URL", help="the pair's own router")
    parser.add_argument(
        "--agent-seconds", type=float, default=600.0, help="how long a request waits for an answer"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30200)
    parser.add_argument("--policy", choices=POLICIES, default=POLICIES[0])
    parser.add_argument("--patience", type=float, default=8.0, help="delay accepted per work saved")
    parser.add_argument(
        "--saturation",
        type=float,
        default=1.2,
        metavar="FORWARDS",
        help="most work sent to one engine, in forwards; 0: no limit",
    )
    parser.add_argument("--model-config", type=Path, help="the model's config.json, for FLOPs")
    parser.add_argument("--api-key", help="key for the router's own requests to the engines")
    parser.add_argument(
        "--tokenize", choices=tuple(_TOKENIZE), default="auto", help="compare tokens, not texts"
    )
    parser.add_argument("--max-body-bytes", type=int, default=32 << 20)
    parser.add_argument("--max-waiting", type=int, default=10_000)
    parser.add_argument(
        "--hung-seconds", type=float, default=40.0, help="until a silent engine counts as lost"
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
    config = parsed.model_config
    return RouterOptions(
        engines=[engine_url(url) for url in parsed.engine],
        policy=policies[parsed.policy](),
        api_key=parsed.api_key,
        model_config=json.loads(config.read_text()) if config else None,
        saturation_margin=parsed.saturation,
        tokenize=_TOKENIZE[parsed.tokenize],
        max_body_bytes=parsed.max_body_bytes,
        max_waiting=parsed.max_waiting,
        hung_seconds=parsed.hung_seconds,
    )


def _make_shell_options(parsed: argparse.Namespace) -> ShellOptions:
    from flashmoa.router.shell.application import ShellOptions

    return ShellOptions(
        prefill=engine_url(parsed.prefill),
        pd_router=engine_url(parsed.pd_router),
        agent_seconds=parsed.agent_seconds,
        max_body_bytes=parsed.max_body_bytes,
    )
