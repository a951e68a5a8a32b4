"""``flashmoa moa``: serve mixtures, staircases and debates, and check what they need."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from rich.console import Console

from flashmoa import EngineClient, FlashMoAError
from flashmoa.cli.doctor import print_findings
from flashmoa.cli.ports import api_url, bind, port_problem
from flashmoa.doctor import EngineToCheck, Finding, check_engine

if TYPE_CHECKING:
    from flashmoa.moa.config import EarlyExitConfig, MixtureConfig

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
        from flashmoa.moa.serve.config_file import read_file

        try:
            configs = read_file(options.config)
            if options.command == "check":
                return anyio.run(_check, configs)
            return _serve(configs, options)
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


async def _check(configs: Sequence[MixtureConfig]) -> int:
    """Check every engine of the models, and the embedders of early exit."""
    asked = [
        (url, model.api_key, model.model)
        for config in configs
        for layer in (*config.layers, config.fallback)
        for model in layer.models
        for url in model.urls
    ]
    findings: list[Finding] = []
    for url, key, model in dict.fromkeys(asked):
        target = EngineToCheck(url, key, None if model == "default" else model)
        findings += [replace(one, text=f"{url}: {one.text}") for one in await check_engine(target)]
    for config in configs:
        if config.early_exit is not None:
            findings.append(await _check_embedder(config.early_exit))
    print_findings(findings, Console(highlight=False))
    return 1 if any(finding.level == "fix" for finding in findings) else 0


async def _check_embedder(table: EarlyExitConfig) -> Finding:
    """Embed a text as early exit does."""
    from flashmoa.moa.early_exit import EngineEmbedder

    try:
        async with EngineClient(table.embedder, api_key=table.api_key, timeout=60) as engine:
            await EngineEmbedder(engine, table.model).embed("Tuesday.")
    except FlashMoAError as error:
        return Finding("fix", "embedder", str(error), "correct [early_exit], or remove it")
    return Finding("ok", "embedder", f"{table.embedder} embeds texts")


def _serve(configs: Sequence[MixtureConfig], options: argparse.Namespace) -> int:
    import uvicorn

    from flashmoa.moa.serve.application import ServeOptions, application

    # A mistake that only shows when the models are built is told before anything is served.
    anyio.run(_build, configs)
    app = application(
        configs,
        ServeOptions(
            api_key=options.api_key,
            max_questions=options.max_questions,
            heartbeat_seconds=options.heartbeat_seconds,
        ),
    )
    names = ", ".join(config.name for config in configs)
    with bind(options.host, options.port) as listening, suppress(KeyboardInterrupt):
        print(f"flashmoa: {names} on {api_url(options.host, options.port)}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listening])
    return 0


async def _build(configs: Sequence[MixtureConfig]) -> None:
    """Build all models once. Raises: FlashMoAError if one cannot be built."""
    async with AsyncExitStack() as stack:
        for config in configs:
            await config.build(stack)
