"""The ``flashmoa`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec

from flashmoa.cli import doctor, moa, router, score, serve, trace
from flashmoa.cli.checks import pip_install


def _run_benchmarks(command: str, module: str, arguments: Sequence[str]) -> int:
    """Run a command of the package ``flashmoa-bench``, or print how to install it and return 1."""
    if find_spec("flashmoa_bench") is None:
        install = pip_install("flashmoa-bench", "./benchmarks")
        print(f"flashmoa {command} needs the package flashmoa-bench: {install}", file=sys.stderr)
        return 1
    return int(import_module(f"flashmoa_bench.{module}").main(arguments))


bench = partial(_run_benchmarks, "bench", "cli")
plan = partial(_run_benchmarks, "plan", "plan.command")
_COMMANDS = {
    "serve": serve.main,
    "bench": bench,
    "plan": plan,
    "trace": trace.main,
    "doctor": doctor.main,
    "moa": moa.main,
    "score": score.main,
    "router": router.main,
}
_USAGE = """\
usage: flashmoa serve --model-path PATH [any SGLang argument]
       flashmoa bench NAME [options]
       flashmoa plan FILE [--engines N] [--gpu GPU] [--model NAME] [options]
       flashmoa trace FILE [--html FILE]
       flashmoa doctor [--engine URL]
       flashmoa moa serve CONFIG.toml [options]
       flashmoa moa check CONFIG.toml
       flashmoa score INPUT.jsonl --out OUT.jsonl
       flashmoa router --engine URL --engine URL [options]
       flashmoa router --prefill URL --pd-router URL [options]

  serve   start an SGLang server with FlashMoA's plugin, on a GPU or on the CPU
  bench   measure FlashMoA against stock SGLang; flashmoa bench --help lists the benchmarks
  plan    run a team on modelled GPUs, to see what linking it would save; needs no GPU
  trace   show a run that link(team, trace=FILE) has recorded
  moa     serve mixtures of agents, staircases and debates as models of the OpenAI API, or check
          what they need
  score   compute how likely given answers are, for each line of a file, without decoding
  router  serve several engines at one address and send each request where its prefix is cached;
          or serve requests that read each other's answers, on a PD pair
  doctor  check what is installed here and a running engine, and show how to fix problems
"""


def main() -> None:
    """Run the command that the process's arguments name. Raises: SystemExit with its status."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        raise SystemExit(0 if arguments else 2)
    if arguments[0] not in _COMMANDS:
        print(f"flashmoa: {arguments[0]!r} is not a command\n{_USAGE}", file=sys.stderr, end="")
        raise SystemExit(2)
    raise SystemExit(_COMMANDS[arguments[0]](arguments[1:]))
