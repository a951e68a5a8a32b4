"""``flashmoa moa``: serve mixtures, staircases, debates and councils, and check their engines."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from rich.console import Console

from flashmoa import EngineClient, FlashMoAError
from flashmoa.cli.checks import Finding, check_engine
from flashmoa.cli.doctor import print_findings
from flashmoa.cli.ports import api_url, bind, port_problem
from flashmoa.errors import EngineError, PluginMissing

if TYPE_CHECKING:
    from flashmoa.moa.config import ServedSystem
    from flashmoa.moa.early_exit import Embedder

_DESCRIPTION = "Serve mixtures of agents, staircases, debates and councils by the OpenAI API."
_API_KEY = "FLASHMOA_API_KEY"
_TIMEOUT_SECONDS = 60.0
_QUESTION = [{"role": "user", "content": "Which day comes after Monday?"}]
_BEGINNING = {"role": "assistant", "content": "The day after Monday is"}


def main(arguments: Sequence[str]) -> int:
    """Run a command of ``flashmoa moa``. Return the exit status."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    if options.command == "serve":
        if problem := port_problem(options.port):
            parser.error(problem)
        for name in ("max_questions", "heartbeat_seconds"):
            if not getattr(options, name) > 0:
                option = f"--{name.replace('_', '-')}"
                parser.error(f"{option} {getattr(options, name)} is not above 0")
        if options.api_key is not None and not options.api_key.strip():
            parser.error("--api-key is empty; give the key that clients must send, or leave it out")
    try:
        from flashmoa.moa.config import read_file

        try:
            systems = read_file(options.config)
            if options.command == "check":
                return anyio.run(_check, systems)
            return _serve(systems, options)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT  # A shell reports this status after Ctrl-C.
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
    text = "check every engine of a file; the exit status is 1 if something is missing"
    check = commands.add_parser("check", help=text)
    for command in (serve, check):
        text = "the file that describes the models"
        command.add_argument("config", type=Path, metavar="CONFIG.toml", help=text)
    add = serve.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=30100, help="port to listen on (%(default)s)")
    key = os.environ.get(_API_KEY) or None
    text = f"the key that clients must send; by default {_API_KEY} in the environment"
    add("--api-key", default=key, metavar="KEY", help=text)
    text = "the most questions at once; more are refused with status 429 (%(default)s)"
    add("--max-questions", type=int, default=64, metavar="N", help=text)
    text = "how long a streamed answer may be silent before a comment is sent (%(default)g)"
    add("--heartbeat-seconds", type=float, default=10.0, metavar="S", help=text)
    return parser


async def _check(systems: Sequence[ServedSystem]) -> int:
    """Check every engine as ``flashmoa doctor`` does, agents' requests to it, and embedders."""
    # The form of some agents' requests, by the engine's URL, its API key and the model's name.
    forms: dict[tuple[str, str | None, str], dict[str, Any]] = {}
    found: list[Finding] = []
    for served in systems:
        system, keys = served.system, {engine: key for key, engine in served.engines.items()}
        steps = {"continue_final_message": True, "add_generation_prompt": False}
        for layer, models in enumerate([*system.layers, system.fallback.models]):
            for place, model in enumerate(models):
                form = steps if layer and system.steps is not None else {}
                if system.is_scored(layer, place):
                    form = {**form, "logprobs": True}
                for engine in (model.engine, *model.backups):
                    forms.setdefault((*keys[engine], model.model), {}).update(form)
        if system.early_exit is not None:
            found.append(await _check_embedder(system.early_exit.embedder))
        await served.close()
    for (url, key, model), form in forms.items():
        checked = await check_engine(url, api_key=key, model=None if model == "default" else model)
        if not any(one.level == "fix" for one in checked):
            checked.append(await _ask(url, key, model, form))
        found += [replace(one, text=f"{url}: {one.text}") for one in checked]
    print_findings(found, Console(highlight=False))
    return 1 if any(finding.level == "fix" for finding in found) else 0


async def _ask(url: str, key: str | None, model: str, form: Mapping[str, Any]) -> Finding:
    """Ask a model for a token in the form of agents' requests."""
    messages = [*_QUESTION, *([_BEGINNING] if "continue_final_message" in form else [])]
    logprobs: list[float] = []
    try:
        async with (
            EngineClient(url, api_key=key, timeout=_TIMEOUT_SECONDS) as engine,
            engine.chat(messages, model=model, max_tokens=1, **form) as deltas,
        ):
            async for delta in deltas:
                logprobs += delta.logprobs
    except FlashMoAError as error:
        text = f"it refuses an agent's request to {model!r}: {error}"
        return Finding("fix", "request", text, "see the engine's log")
    if "logprobs" in form and not logprobs:
        text = f"{model!r} gives no log-probabilities, by which early exit judges answers"
        return Finding("fix", "request", text, "use SGLang or vLLM, or remove [early_exit]")
    return Finding("ok", "request", f"{model!r} answers agents' requests")


async def _check_embedder(embedder: Embedder) -> Finding:
    try:
        with anyio.fail_after(_TIMEOUT_SECONDS):
            await embedder.compare(["Tuesday.", "On Monday."])
    except (FlashMoAError, TimeoutError) as error:
        text = str(error) or f"it did not answer within {_TIMEOUT_SECONDS:g} s"
        return Finding("fix", "embedder", text, "correct [early_exit], or remove it")
    return Finding("ok", "embedder", "it compares texts")


async def _print_missing_engines(systems: Sequence[ServedSystem]) -> bool:
    """Print which engines do not answer. Return whether there are any."""
    missing = False

    async def reach(url: str, key: str | None) -> None:
        nonlocal missing
        try:
            async with EngineClient(url, api_key=key, timeout=3.0) as engine:
                await engine.plain.models()
        except PluginMissing:  # It answers, but does not list its models.
            pass
        except EngineError as error:
            missing = True
            print(f"flashmoa moa: {error}", file=sys.stderr, flush=True)

    async with anyio.create_task_group() as tasks:
        for url, key in dict.fromkeys(each for served in systems for each in served.engines):
            tasks.start_soon(reach, url, key)
    return missing


def _serve(systems: Sequence[ServedSystem], options: argparse.Namespace) -> int:
    import uvicorn

    from flashmoa.moa.serve.application import ServeOptions, application

    app = application(
        systems,
        ServeOptions(
            api_key=options.api_key and options.api_key.strip(),
            max_questions=options.max_questions,
            heartbeat_seconds=options.heartbeat_seconds,
        ),
    )
    names = ", ".join(system.name for system in systems)
    with bind(options.host, options.port) as listening, suppress(KeyboardInterrupt):
        if anyio.run(_print_missing_engines, systems):
            advice = f"`flashmoa moa check {options.config}` checks every engine"
            print(f"flashmoa moa: the server starts all the same; {advice}", file=sys.stderr)
        print(f"flashmoa: {names} on {api_url(options.host, options.port)}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listening])
    return 0
