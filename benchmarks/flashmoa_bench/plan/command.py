"""``flashmoa plan FILE``: run a team on modelled GPUs, to see what linking it would save."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import anyio
from rich.console import Console

from flashmoa.errors import FlashMoAError
from flashmoa.observe.page import page
from flashmoa_bench.harness.command_line import positive
from flashmoa_bench.harness.modelled_gpus import slowdown
from flashmoa_bench.plan.planning import plan
from flashmoa_bench.plan.result import PlanResult, show


def main(arguments: Sequence[str]) -> int:
    """Plan a team, and print what linking it saves. Return the exit status."""
    options = make_parser().parse_args(arguments)
    if find_spec("sglang") is None or find_spec("flashmoa_cpu") is None:
        missing = (
            "the engines need SGLang, the plugin and the CPU platform: make setup in a clone of "
            "FlashMoA's repository, and source .venv/bin/activate"
        )
        print(f"flashmoa plan: {missing}", file=sys.stderr)
        return 1
    console = Console()
    # Engines are on this machine. Of the two spellings, the one in small letters prevails.
    kept = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = f"{kept},127.0.0.1" if kept else "127.0.0.1"
    try:
        with console.status("") as status:
            result = anyio.run(plan, options, status.update)
        show(result, console)
        _write(result, options, ["flashmoa", "plan", *arguments])
    except (FlashMoAError, OSError) as error:
        print(f"flashmoa plan: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # A shell reports this, 128 + SIGINT, for a program that Ctrl-C ended.
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashmoa plan",
        description="Run a team on engines that take the time of GPUs which are not here, unlinked "
        "and linked.\nIt needs no GPU; see docs/plan.md.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="Python file with the team, or a dumped one (.json)"
    )
    single = (
        ("--team", str, "NAME", None, "variable or function in it (default: build_team, or team)"),
        ("--task", str, "TEXT", None, "the team's task (default: TASK in the file)"),
        ("--max-turns", positive, "N", None, "end the team after N turns"),
        ("--engines", positive, "N", None, "default: one per address and model in the file"),
        ("--slowdown", slowdown, "K", 1.0, "of all times, for a machine that does not keep up"),
        ("--tokenizer", _folder, "FOLDER", None, "the model's tokenizer (default: made)"),
        ("--concurrency", positive, "N", 1, "copies at once"),
        ("--rounds", positive, "N", 3, "of each way (%(default)s)"),
        ("--json", Path, "FILE", None, "write the figures"),
        ("--html", Path, "FILE", None, "write the linked run's page, and FILE-unlinked.html"),
    )
    for option, kind, metavar, default, text in single:
        parser.add_argument(option, type=kind, metavar=metavar, default=default, help=text)
    repeated = (
        ("--include", str, "AGENT", "link an agent of your own class, as link(include=) does"),
        ("--gpu", str, "GPU", "once, or once for each engine: h200_sxm (the default), a100_sxm"),
        ("--model", str, "NAME", "the same: whose times are taken (default: Qwen/Qwen3-32B)"),
        ("--tp", positive, "N", "the same: GPUs that a model is divided among (default: 1)"),
        ("--output-tokens", _by_agent, "[AGENT=]N", "of answers (default: clients' max_tokens)"),
    )
    for option, kind, metavar, text in repeated:
        parser.add_argument(
            option, type=kind, metavar=metavar, default=[], action="append", help=text
        )
    return parser


def _by_agent(text: str) -> tuple[str | None, int]:
    agent, _, number = text.rpartition("=")
    return agent or None, positive(number)


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return Path(text)


def _write(result: PlanResult, options: argparse.Namespace, command: Sequence[str]) -> None:
    if options.json is not None:
        document = {"command": " ".join(command), **result.as_json()}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=2) + "\n")
        print(f"\nThe same as JSON: {options.json}")
    if options.html is not None:
        options.html.parent.mkdir(parents=True, exist_ok=True)
        unlinked = options.html.with_name(f"{options.html.stem}-unlinked{options.html.suffix}")
        for way, file in (("linked", options.html), ("unlinked", unlinked)):
            title = f"{options.file.name}, {way}, {result.gpus}"
            file.write_text(page(result.typical[way].events, title), encoding="utf-8")
        print(f"For a browser: {options.html} and {unlinked}")
