"""``flashmoa doctor``: checks an installation and an engine, and says how to fix what is wrong."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

import anyio
from rich.console import Console
from rich.text import Text

from flashmoa.doctor import EngineToCheck, Finding, Level, check_engine, check_installation

_STYLES: dict[Level, str] = {"ok": "green", "note": "yellow", "fix": "red"}


def main(arguments: Sequence[str]) -> int:
    """Check, and print the findings; return 1 where something is to be fixed."""
    options = _options(arguments)
    found = [] if options.engine_only else check_installation()
    if options.engine is not None:
        asked = EngineToCheck(options.engine, options.api_key, options.model, options.calls)
        try:
            found += anyio.run(check_engine, asked)
        except KeyboardInterrupt:
            return 130
    if options.json:
        print(json.dumps([asdict(finding) for finding in found], indent=1))
    else:
        _show(found, Console(highlight=False))
    return 1 if any(finding.level == "fix" for finding in found) else 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="flashmoa doctor",
        description="Checks what is installed here and, with --engine, a running engine. "
        "The exit status is 1 where something is to be fixed.",
    )
    parser.add_argument("--engine", metavar="URL", help="a running engine, http://HOST:PORT")
    parser.add_argument("--api-key", metavar="KEY", help="the engine's --api-key")
    parser.add_argument("--model", metavar="NAME", help="the model as your clients name it")
    parser.add_argument(
        "--no-call",
        dest="calls",
        action="store_false",
        help="make no calls; the check of a link makes two short ones",
    )
    parser.add_argument(
        "--engine-only", action="store_true", help="do not check what is installed here"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(arguments)
    if options.engine is None and (options.engine_only or options.model or options.api_key):
        parser.error("--engine-only, --model and --api-key need --engine URL")
    return options


def _show(found: Sequence[Finding], console: Console) -> None:
    width = max(len(finding.about) for finding in found)
    for finding in found:
        line = Text.assemble(
            (f"{finding.level:4}", _STYLES[finding.level]), f"  {finding.about:{width}}  "
        )
        console.print(line + Text(finding.text), soft_wrap=True)
        if finding.remedy:
            console.print(Text(f"{'':{width + 8}}→ {finding.remedy}"), soft_wrap=True)
    wrong = sum(finding.level == "fix" for finding in found)
    said = f"{wrong} to fix" if wrong else "nothing to fix"
    console.print(f"\n{said}; see docs/troubleshooting.md", markup=False)
