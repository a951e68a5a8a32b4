"""``flashmoa moa serve CONFIG.toml``: serve a Mixture-of-Agents with the OpenAI API."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flashmoa.cli.ports import port_problem

_DESCRIPTION = "Serve a Mixture-of-Agents behind the OpenAI API."


def main(arguments: Sequence[str]) -> int:
    """Serve until stopped. Return the exit status."""
    parser = argparse.ArgumentParser(prog="flashmoa moa", description=_DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve a mixture as one model")
    serve.add_argument(
        "config", type=Path, metavar="CONFIG.toml", help="the file that describes the mixture"
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    serve.add_argument("--port", type=int, default=30100, help="port to listen on (%(default)s)")
    options = parser.parse_args(arguments)
    if problem := port_problem(options.port):
        parser.error(problem)
    try:
        import uvicorn

        from flashmoa.moa.config import ConfigError, MixtureConfig
        from flashmoa.moa.server import application
    except ModuleNotFoundError as error:
        print(
            f"flashmoa moa: {error.name} is not installed; run pip install 'flashmoa[moa]'",
            file=sys.stderr,
        )
        return 1
    try:
        config = MixtureConfig.read(options.config)
    except (OSError, ConfigError) as error:
        print(f"flashmoa moa: {error}", file=sys.stderr)
        return 1
    print(f"flashmoa: {config.name} on http://{options.host}:{options.port}/v1", flush=True)
    uvicorn.run(application(config), host=options.host, port=options.port, log_level="warning")
    return 0
