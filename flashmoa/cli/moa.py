"""``flashmoa moa``: serve mixtures, staircases and debates, and check what they need."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from rich.console import Console

from flashmoa import FlashMoAError
from flashmoa.cli.doctor import print_findings
from flashmoa.cli.ports import api_url, bind, port_problem
from flashmoa.doctor import EngineToCheck, Finding, check_engine

if TYPE_CHECKING:
    from flashmoa.moa.config import ServedSystem
    from flashmoa.moa.early_exit import Embedder

_DESCRIPTION = "Serve mixtures of agents, staircases and debates behind the OpenAI API."
_API_KEY = "FLASHMOA_API_KEY"
_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports a program that Ctrl-C ended.


def main(arguments: Sequence[str]) -> int:
    """Run a command of ``flashmoa moa``. Return the exit status."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    if options.command == "serve" and (problem := port_problem(options.port)):
        parser.error(problem)
    if options.command == "serve" and options.api_key is not None:
        options.api_key = options.api_key.strip()
        if not options.api_key:
            parser.error("--api-key is empty; give the key that clients must send, or leave it out")
    try:
        from flashmoa.moa.config import read_file

        try:
            systems = read_file(options.config)
            if options.command == "check":
                return anyio.run(_check, systems)
            return _serve(systems, options)
        except KeyboardInterrupt:
            return _EXIT_INTERRUPTED
        except (OSError, ValueError, FlashMoAError) as error:
            print(f"flashmoa moa: {error}", file=sys.stderr)
            return 1
    except ModuleNotFoundError as error:
        print(
            f"flashmoa moa: {error.name} is not installed; run pip install 'flashmoa[moa]'",
            file=sys.stderr,
        )
        return 1


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashmoa moa", description=_DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve the models of a file")
    check = commands.add_parser(
        "check",
        help="ask every engine for what the models of a file need; the exit status is 1 if "
        "something is missing",
    )
    for command in (serve, check):
        command.add_argument(
            "config", type=Path, metavar="CONFIG.toml", help="the file that describes the models"
        )
    add = serve.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=30100, help="port to listen on (%(default)s)")
    add(
        "--api-key",
        default=os.environ.get(_API_KEY) or None,
        metavar="KEY",
        help=f"the key that clients must send; by default {_API_KEY} in the environment",
    )
    add(
        "--max-questions",
        type=_positive(int),
        default=64,
        metavar="N",
        help="the most questions that are answered at once; more are refused with status 429 "
        "(%(default)s)",
    )
    add(
        "--heartbeat-seconds",
        type=_positive(float),
        default=10.0,
        metavar="S",
        help="how long a streamed answer may be silent before a comment is sent (%(default)g)",
    )
    return parser


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return a type of arguments: positive numbers."""

    def parse(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not number > 0:
            name = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text} is not a {name} above 0; give one")
        return number

    return parse


async def _check(systems: Sequence[ServedSystem]) -> int:
    """Check the engines of every model as ``flashmoa doctor`` does, and embedders."""
    findings: dict[tuple[str, str | None, str], list[Finding]] = {}
    for served in systems:
        system, embeds = served.system, served.system.early_exit
        models = [model for layer in system.layers for model in layer] + [*system.fallback.models]
        for (url, key), engine in served.engines.items():
            names = [one.model for one in models if engine in (one.engine, *one.backups)]
            for name in names:
                if (url, key, name) not in findings:
                    target = EngineToCheck(url, key, None if name == "default" else name)
                    found = await check_engine(target)
                    found = [replace(one, text=f"{url}: {one.text}") for one in found]
                    findings[url, key, name] = found
        if embeds is not None:
            findings[served.name, None, ""] = [await _check_embedder(embeds.embedder)]
        await served.close()
    shown = [one for found in findings.values() for one in found]
    print_findings(shown, Console(highlight=False))
    return 1 if any(finding.level == "fix" for finding in shown) else 0


async def _check_embedder(embedder: Embedder) -> Finding:
    """Embed a text as early exit does."""
    try:
        await embedder.embed("Tuesday.")
    except FlashMoAError as error:
        return Finding("fix", "embedder", str(error), "correct [early_exit], or remove it")
    return Finding("ok", "embedder", "it embeds texts")


def _serve(systems: Sequence[ServedSystem], options: argparse.Namespace) -> int:
    import uvicorn

    from flashmoa.moa.serve.application import ServeOptions, application

    app = application(
        systems,
        ServeOptions(
            api_key=options.api_key,
            max_questions=options.max_questions,
            heartbeat_seconds=options.heartbeat_seconds,
        ),
    )
    names = ", ".join(system.name for system in systems)
    with bind(options.host, options.port) as listening, suppress(KeyboardInterrupt):
        print(f"flashmoa: {names} on {api_url(options.host, options.port)}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listening])
    return 0
