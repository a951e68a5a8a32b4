"""``flashmoa serve``: start an SGLang server with the plugin."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from flashmoa.cli.ports import bind, port_problem
from flashmoa.cli.server import Server
from flashmoa.doctor.installation import excludes_plugin, installed
from flashmoa.doctor.machine import compiler, runs_engines

_DEFAULT_PORT = 30000
_HELP = """\
usage: flashmoa serve --model-path PATH [--drain-seconds SECONDS] [any SGLang argument]

Starts SGLang with FlashMoA's plugin, on the CPU if there is no GPU. All arguments but one are
SGLang's: python -m sglang.launch_server --help

  --drain-seconds SECONDS  how long requests may still run after SIGTERM or Ctrl-C; then they are
                           ended (30)
"""


def main(arguments: Sequence[str]) -> int:
    """Serve until stopped. Return the exit status."""
    if not arguments or "-h" in arguments or "--help" in arguments:
        print(_HELP, end="")
        return 0 if arguments else 2
    problem = _installation_problem()
    if problem is not None:
        _print_message(problem)
        return 2
    options, arguments = _parse_own_options(arguments)
    problem = (
        _model_problem(options)
        or port_problem(options.port)
        or _drain_problem(options.drain_seconds)
    )
    if problem is not None:
        _print_message(problem)
        return 2
    with socket.socket(socket.AF_UNIX) as lock:
        problem = _listening_problem(options, lock)
        if problem is not None:
            _print_message(problem)
            return 2
        return _serve(arguments, options)


def _serve(arguments: Sequence[str], options: argparse.Namespace) -> int:
    if excludes_plugin(allowed := os.environ.get("SGLANG_PLUGINS", "")):
        _print_message(
            f"SGLANG_PLUGINS={allowed} keeps the plugin out, so nothing is linked on this engine; "
            "unset it, or add flashmoa to it"
        )
    if compiler() is None:
        _print_message("there is no C compiler, and SGLang compiles kernels: apt-get install gcc")
    scheme = "http" if options.ssl_certfile is None else "https"
    address = scheme, options.host, options.port
    problem = Server(arguments, *address, options.drain_seconds).run()
    if problem is not None:
        _print_message(problem.text)
        return problem.status
    return 0


def _print_message(text: str) -> None:
    print(f"flashmoa serve: {text}", file=sys.stderr)


def _parse_own_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command's own argument, and the SGLang arguments that are checked here.

    Those of ``--config``'s file count, too. Return them with the arguments that are SGLang's, which
    it parses itself.
    """
    own = argparse.ArgumentParser(prog="flashmoa serve", add_help=False, allow_abbrev=False)
    own.add_argument("--drain-seconds", type=float, default=30.0)
    options, of_sglang = own.parse_known_args(arguments)
    checked = argparse.ArgumentParser(prog="flashmoa serve", add_help=False, allow_abbrev=False)
    checked.add_argument("--model-path", "--model")
    checked.add_argument("--host", default="127.0.0.1")
    checked.add_argument("--port", type=int, default=_DEFAULT_PORT)
    checked.add_argument("--ssl-certfile")
    checked.add_argument("--config")
    choices = import_module("flashmoa_sglang.asyncep.choices")
    with_file = choices.read_config_file(of_sglang)
    return checked.parse_known_args(with_file, options)[0], of_sglang


def _drain_problem(seconds: float) -> str | None:
    return None if seconds >= 0 else f"--drain-seconds {seconds:g} is not at least 0"


def _installation_problem() -> str | None:
    """Return why no engine can run on this machine, ``None`` if one can."""
    if not runs_engines():
        return (
            "SGLang runs on Linux only; start the engine there (or in WSL or Docker) and give "
            "clients its URL"
        )
    if find_spec("sglang") is None:
        return "SGLang is not installed here; README.md says how, for a GPU and for a CPU"
    if find_spec("flashmoa_sglang") is None:
        return "the plugin is not installed here: pip install ./server_patches"
    releases = import_module("flashmoa_sglang.releases")
    release = installed("sglang") or ""
    return releases.too_old(release)


def _model_problem(options: argparse.Namespace) -> str | None:
    if options.model_path is None:
        return None if options.config is not None else "no model is given; add --model-path PATH"
    path = Path(options.model_path)
    if path.is_dir() and not any((path / name).exists() for name in ("config.json", "params.json")):
        return (
            f"--model-path {path} is not a model: it has no config.json; give a model's folder, "
            "or its name on Hugging Face"
        )
    if not path.exists() and options.model_path.startswith(("/", ".", "~")):
        return f"--model-path {path} does not exist"
    return None


def _listening_problem(options: argparse.Namespace, lock: socket.socket) -> str | None:
    """Return why SGLang cannot listen on its address, ``None`` if it can.

    Args:
        lock: is bound to reserve the port among commands of this kind, since SGLang listens only
            after it has loaded the model.
    """
    try:
        bind(options.host, options.port).close()
    except OSError as error:
        return str(error)
    try:
        lock.bind(f"\0flashmoa-serve-{options.port}")
    except OSError:
        return f"port {options.port} is in use; choose another one with --port"
    return None
