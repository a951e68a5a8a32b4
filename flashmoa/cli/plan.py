"""``flashmoa plan FILE``: run a team on modelled GPUs, to see what linking it would save."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio
from rich.console import Console

from flashmoa.errors import FlashMoAError
from flashmoa.observe.page import page

if TYPE_CHECKING:
    from flashmoa.plan.planning import PlanOptions
    from flashmoa.plan.result import PlanResult

Number = TypeVar("Number", int, float)
_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports a program that Ctrl-C ended.
_DESCRIPTION = """\
Run a team on engines that take the time of GPUs which are not here, unlinked and linked.
It needs no GPU; see docs/plan.md."""


def main(arguments: Sequence[str]) -> int:
    """Plan a team, and print what linking it saves. Return the exit status."""
    parser = _make_parser()
    parsed = parser.parse_args(arguments)
    if missing := _find_missing():
        print(f"flashmoa plan: {missing}", file=sys.stderr)
        return 1
    from flashmoa.plan.planning import plan
    from flashmoa.plan.report import show

    console = Console()
    _keep_from_proxies("127.0.0.1")
    try:
        options = _make_options(parsed)
        with console.status("") as status:
            result = anyio.run(plan, options, status.update)
        show(result, console)
        _write(result, parsed, ["flashmoa", "plan", *arguments])
    except (FlashMoAError, OSError) as error:
        print(f"flashmoa plan: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return 0


def _keep_from_proxies(host: str) -> None:
    """Let this process's HTTP clients, those of agents, too, reach a host without any proxy."""
    kept = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    # Of the two spellings, this one prevails.
    os.environ["no_proxy"] = f"{kept},{host}" if kept else host


def _find_missing() -> str | None:
    """Return which package a plan needs and is not installed, with the command that installs it."""
    if find_spec("autogen_agentchat") is None or find_spec("autogen_ext") is None:
        return "AutoGen is not installed: pip install 'flashmoa[autogen]'"
    if find_spec("sglang") is None or find_spec("flashmoa_sglang") is None:
        return "the engines need SGLang and the plugin: pip install './server_patches[device]'"
    return None


def _make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="flashmoa plan", description=_DESCRIPTION, formatter_class=raw
    )
    _add_team_options(parser.add_argument_group("team"))
    _add_engine_options(parser.add_argument_group("engines"))
    _add_run_options(parser.add_argument_group("runs"))
    return parser


def _add_team_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "file",
        type=Path,
        metavar="FILE",
        help="Python file with the team, or a dumped team (.json)",
    )
    add("--team", metavar="NAME", help="variable or function in it (default: build_team, or team)")
    add("--task", metavar="TEXT", help="the team's task (default: TASK in the file)")
    add(
        "--output-tokens",
        action="append",
        default=[],
        metavar="N|AGENT=N",
        help="length of every answer, or of an agent's (default: max_tokens of the agent's client)",
    )
    add("--max-turns", type=_positive(int), metavar="N", help="end the team after N turns")
    add(
        "--include",
        action="append",
        default=[],
        metavar="AGENT",
        help="link an agent of your own class, as link(team, include=[...]) does",
    )


def _add_engine_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--engines",
        type=_positive(int),
        metavar="N",
        help="number of engines (default: one for each address and model in the file)",
    )
    add(
        "--place",
        action="append",
        default=[],
        metavar="AGENT=N",
        help="engine of an agent, from 1 (default: by address; with other numbers, in turn)",
    )
    for option, kind, metavar, help_text in (
        ("--gpu", str, "GPU", "such as h200_sxm (the default), h100_sxm, a100_sxm"),
        ("--model", str, "NAME", "model whose times are taken (default: Qwen/Qwen3-32B)"),
        ("--tp", _positive(int), "N", "GPUs that an engine's model is divided among (default: 1)"),
    ):
        each = f"{help_text}; give it once, or once for each engine"
        add(option, action="append", type=kind, metavar=metavar, help=each)
    add(
        "--slowdown",
        type=_positive(float),
        default=1.0,
        metavar="K",
        help="factor of all times of the GPUs, for a machine that does not keep up",
    )
    add("--tokenizer", type=Path, metavar="FOLDER", help="the model's tokenizer (default: made)")


def _add_run_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--concurrency", type=_positive(int), default=1, metavar="N", help="copies at once")
    add("--rounds", type=_positive(int), default=3, metavar="N", help="of each way (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    add(
        "--html",
        type=Path,
        metavar="FILE.html",
        help="write pages of the linked run and, as FILE-unlinked.html, of the unlinked one",
    )


def _make_options(parsed: argparse.Namespace) -> PlanOptions:
    """Return what the command line asks for. Raises: PlanError if it cannot be meant."""
    from flashmoa.plan.errors import PlanError
    from flashmoa.plan.planning import PlanOptions
    from flashmoa.plan.team_file import TeamFile

    if parsed.tokenizer is not None and not parsed.tokenizer.is_dir():
        raise PlanError(f"--tokenizer {parsed.tokenizer} is not a folder")
    for option, file in (("--json", parsed.json), ("--html", parsed.html)):
        if file is not None and not file.parent.is_dir():
            raise PlanError(f"{option} {file}: {file.parent} is not a folder; make it first")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    lengths = [value for value in parsed.output_tokens if "=" not in value]
    by_agent = [value for value in parsed.output_tokens if "=" in value]
    places = _by_agent(parsed.place, "--place")
    return PlanOptions(
        file=TeamFile(parsed.file, parsed.team),
        cache=cache / "flashmoa" / "plan",
        task=parsed.task,
        gpus=parsed.gpu or ["h200_sxm"],
        models=parsed.model or ["Qwen/Qwen3-32B"],
        tensor_parallel=parsed.tp or [1],
        slowdown=parsed.slowdown,
        engines=parsed.engines,
        pinned={agent: number - 1 for agent, number in places.items()},
        tokens=_parse_count(lengths[-1], "--output-tokens") if lengths else None,
        tokens_by_agent=_by_agent(by_agent, "--output-tokens"),
        max_turns=parsed.max_turns,
        include=parsed.include,
        copies=parsed.concurrency,
        rounds=parsed.rounds,
        tokenizer=parsed.tokenizer,
    )


def _by_agent(values: Sequence[str], option: str) -> dict[str, int]:
    from flashmoa.plan.errors import PlanError

    pairs = [value.rpartition("=") for value in values]
    if wrong := next((number for agent, _, number in pairs if not agent), None):
        raise PlanError(f"{option} {wrong}: give AGENT=N")
    return {agent: _parse_count(number, option) for agent, _, number in pairs}


def _parse_count(text: str, option: str) -> int:
    from flashmoa.plan.errors import PlanError

    if not text.isdecimal() or int(text) < 1:
        raise PlanError(f"{option}: {text!r} is not a whole number above 0")
    return int(text)


def _positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        number = kind(text)
        if number <= 0:
            raise ValueError
        return number

    parse.__name__ = "number above 0"
    return parse


def _write(result: PlanResult, parsed: argparse.Namespace, command: Sequence[str]) -> None:
    if parsed.json is not None:
        document = {"command": " ".join(command), **result.as_json()}
        parsed.json.write_text(json.dumps(document, indent=2) + "\n")
        print(f"\nThe same as JSON: {parsed.json}")
    if parsed.html is not None:
        unlinked = parsed.html.with_name(f"{parsed.html.stem}-unlinked{parsed.html.suffix}")
        for way, file in (("linked", parsed.html), ("unlinked", unlinked)):
            title = f"{parsed.file.name}, {way}, {result.describe_gpus()}"
            file.write_text(page(result.typical[way].events, title), encoding="utf-8")
        print(f"For a browser: {parsed.html} and {unlinked}")
