"""``flashmoa doctor``: check an installation and an engine, and show how to fix problems."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import anyio
from rich.console import Console
from rich.text import Text

from flashmoa.cli.checks import Finding, Level, check_engine, check_installation

_STYLES: dict[Level, str] = {"ok": "green", "note": "yellow", "fix": "red"}


def main(arguments: Sequence[str]) -> int:
    """Check, and print the findings. Return 1 if a problem needs fixing, otherwise 0."""
    options = _parse_options(arguments)
    findings = [] if options.engine_only else check_installation()
    if options.engine is not None:
        check = partial(
            check_engine,
            options.engine,
            api_key=options.api_key,
            model=options.model,
            calls=options.calls,
        )
        try:
            findings += anyio.run(check)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print_findings(findings, Console(highlight=False))
    return 1 if any(finding.level == "fix" for finding in findings) else 0


def _parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="flashmoa doctor",
        description="Checks what is installed here and, with --engine, a running engine. The exit "
        "status is 1 if a problem needs fixing.",
    )
    parser.add_argument("--engine", metavar="URL", help="URL of a running engine, http://HOST:PORT")
    parser.add_argument(
        "--api-key", metavar="KEY", help="the API key that the engine was started with"
    )
    parser.add_argument("--model", metavar="NAME", help="the model's name, as your clients give it")
    parser.add_argument(
        "--no-call",
        dest="calls",
        action="store_false",
        help="do not make the two short calls that check a link",
    )
    parser.add_argument(
        "--engine-only", action="store_true", help="do not check what is installed here"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(arguments)
    if options.engine is None and (options.engine_only or options.model or options.api_key):
        parser.error("--engine-only, --model and --api-key need --engine URL")
    return options


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print each finding and its remedy, and how many findings need fixing."""
    width = max(len(finding.about) for finding in findings)
    for finding in findings:
        line = Text.assemble(
            (f"{finding.level:4}", _STYLES[finding.level]), f"  {finding.about:{width}}  "
        )
        console.print(line + Text(finding.text), soft_wrap=True)
        if finding.remedy:
            console.print(Text(f"{'':{width + 8}}→ {finding.remedy}"), soft_wrap=True)
    to_fix = sum(finding.level == "fix" for finding in findings) or "nothing"
    console.print(f"\n{to_fix} to fix; see docs/troubleshooting.md", markup=False)
