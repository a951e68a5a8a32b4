"""``flashmoa router``: several engines, or a PD pair, behind one address.

With --engine, each request goes where its prefix is. With --prefill and --pd-router, requests may
read each other's answers, and their prompts are prefilled while those are written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashmoa.router.application import RouterOptions
    from flashmoa.router.shell.application import ShellOptions

POLICIES = ("prefix_aware", "cache_aware", "round_robin", "random")


def main(arguments: Sequence[str]) -> int:
    """Serve until stopped; returns the exit status."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if bool(chosen.pd_router) != bool(chosen.prefill) or bool(chosen.engine) == bool(
        chosen.prefill
    ):
        parser.error("give --engine, or --prefill and --pd-router")
    try:
        import uvicorn

        from flashmoa.router.application import application
        from flashmoa.router.shell.application import shell_application
    except ModuleNotFoundError as error:
        print(f"flashmoa router: it needs {error.name}: {_INSTALL}", file=sys.stderr)
        return 1
    try:
        if chosen.pd_router:
            app, served = shell_application(_shell_options(chosen)), "a PD pair"
        else:
            app = application(_options(chosen))
            served = f"{len(chosen.engine)} engines"
    except (OSError, ValueError) as error:
        print(f"flashmoa router: {error}", file=sys.stderr)
        return 1
    print(f"flashmoa: {served} behind http://{chosen.host}:{chosen.port}/v1")
    sys.stdout.flush()
    uvicorn.run(app, host=chosen.host, port=chosen.port, log_level="warning")
    return 0


_TOKENIZE = {"auto": None, "always": True, "never": False}
_INSTALL = "pip install 'flashmoa[router]'"


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="flashmoa router", description=__doc__, formatter_class=raw
    )
    parser.add_argument("--engine", action="append", default=[], metavar="URL")
    parser.add_argument("--prefill", metavar="URL", help="the prefill engine of a PD pair")
    parser.add_argument("--pd-router", metavar="URL", help="the pair's own router")
    parser.add_argument(
        "--agent-seconds", type=float, default=600.0, help="how long a request waits for an answer"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30200)
    parser.add_argument("--policy", choices=POLICIES, default=POLICIES[0])
    parser.add_argument("--patience", type=float, default=8.0, help="delay taken for work saved")
    parser.add_argument(
        "--saturation", type=float, default=1.2, metavar="FORWARDS", help="of work; 0: no limit"
    )
    parser.add_argument("--model-config", type=Path, help="the model's config.json, for FLOPs")
    parser.add_argument("--api-key", help="for the router's own questions to the engines")
    parser.add_argument(
        "--tokenize", choices=tuple(_TOKENIZE), default="auto", help="compare tokens, not texts"
    )
    parser.add_argument("--max-body-bytes", type=int, default=32 << 20)
    parser.add_argument("--max-waiting", type=int, default=10_000)
    parser.add_argument(
        "--hung-seconds", type=float, default=40.0, help="until a silent engine counts as gone"
    )
    return parser


def _options(chosen: argparse.Namespace) -> RouterOptions:
    from flashmoa.engine import engine_url
    from flashmoa.router.application import RouterOptions
    from flashmoa.router.policies import CacheAware, Random, RoundRobin
    from flashmoa.router.prefix_aware import PrefixAware

    policies = {
        "prefix_aware": lambda: PrefixAware(patience=chosen.patience),
        "cache_aware": CacheAware,
        "round_robin": RoundRobin,
        "random": Random,
    }
    config = chosen.model_config
    return RouterOptions(
        engines=[engine_url(url) for url in chosen.engine],
        policy=policies[chosen.policy](),
        api_key=chosen.api_key,
        model_config=json.loads(config.read_text()) if config else None,
        saturation_margin=chosen.saturation,
        tokenize=_TOKENIZE[chosen.tokenize],
        max_body_bytes=chosen.max_body_bytes,
        max_waiting=chosen.max_waiting,
        hung_seconds=chosen.hung_seconds,
    )


def _shell_options(chosen: argparse.Namespace) -> ShellOptions:
    from flashmoa.engine import engine_url
    from flashmoa.router.shell.application import ShellOptions

    return ShellOptions(
        prefill=engine_url(chosen.prefill),
        pd_router=engine_url(chosen.pd_router),
        agent_seconds=chosen.agent_seconds,
        max_body_bytes=chosen.max_body_bytes,
    )
