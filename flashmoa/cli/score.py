"""``flashmoa score INPUT.jsonl --out OUT.jsonl``: how likely given answers are, line by line."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import anyio
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from flashmoa.engine import EngineClient, EngineError, self_hosted_url
from flashmoa.scoring import Scorer
from flashmoa.scoring.bulk import Totals, score_file
from flashmoa.scoring.lines import NotResumable

# Seconds between two lines about the progress where there is no terminal.
_QUIET = 10.0
_SKIPPED, _INTERRUPTED = 3, 130
_LINES = """
each line of INPUT is an object with a context ("context": text or token ids, or "messages") and
  "candidates": [...]                what may follow it: texts, or token ids
  "labels": [...] or {name: text}    candidates of one token each
  "options": [...]                   lettered, for one choice; with "multiple": true each by itself
and an "id" if you like. Run again with the same arguments, it goes on where it ended.

exit status: 0 every line is scored, 3 some were skipped, 1 it stopped before the end
"""


def main(arguments: Sequence[str]) -> int:
    """Score a file; returns the exit status."""
    options = _options(arguments)
    shown = _Shown(options.input)
    started = time.monotonic()
    try:
        with shown:
            totals = anyio.run(_score, options, shown)
    except KeyboardInterrupt:
        print("flashmoa score: stopped; the same command goes on from here", file=sys.stderr)
        return _INTERRUPTED
    except (NotResumable, OSError) as error:
        print(f"flashmoa score: {error}", file=sys.stderr)
        return 1
    except EngineError as error:
        print(f"flashmoa score: {error}\nThe same command goes on from here.", file=sys.stderr)
        return 1
    _say(totals, options, time.monotonic() - started)
    return _SKIPPED if options.errors.exists() else 0


async def _score(options: argparse.Namespace, shown: _Shown) -> Totals:
    async with EngineClient(options.engine, api_key=options.api_key) as engine:
        scorer = Scorer(
            engine, template_args=options.template_args, concurrency=options.concurrency
        )
        return await score_file(
            scorer,
            options.input,
            options.out,
            errors=options.errors,
            concurrency=options.concurrency,
            progress=shown,
        )


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="flashmoa score",
        description="Scores given answers with one prefill each; nothing is decoded.",
        epilog=_LINES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("input", type=Path, metavar="INPUT.jsonl")
    parser.add_argument("--out", type=Path, required=True, metavar="OUT.jsonl")
    parser.add_argument(
        "--engine", metavar="URL", help="http://HOST:PORT; OPENAI_BASE_URL, or this machine's 30000"
    )
    parser.add_argument("--api-key", metavar="KEY", help="what the engine was started with")
    parser.add_argument(
        "--errors", type=Path, metavar="FILE", help="lines that were skipped (OUT.errors.jsonl)"
    )
    parser.add_argument("--concurrency", type=int, default=32, metavar="N", help="lines at once")
    parser.add_argument(
        "--template-args",
        type=_json_object,
        metavar="JSON",
        help='of the chat template, such as {"enable_thinking": false}',
    )
    parser.add_argument("--overwrite", action="store_true", help="begin anew")
    options = parser.parse_args(arguments)
    options.errors = options.errors or options.out.with_suffix(".errors.jsonl")
    if options.concurrency < 1:
        parser.error("--concurrency is at least 1")
    if len({one.resolve() for one in (options.input, options.out, options.errors)}) < 3:
        parser.error("INPUT, OUT and the errors are three files")
    try:
        options.engine = self_hosted_url(options.engine)
    except ValueError as error:
        parser.error(str(error))
    if options.overwrite:
        options.out.unlink(missing_ok=True)
    return options


def _json_object(text: str) -> Mapping[str, Any]:
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return cast("dict[str, Any]", value)


class _Shown:
    """How far it is: a bar on a terminal, else a line now and then."""

    def __init__(self, source: Path) -> None:
        self._size = source.stat().st_size if source.exists() else 0
        self._said = time.monotonic()
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=self._size)

    def __enter__(self) -> None:
        if self._bar is not None:
            self._bar.start()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, totals: Totals) -> None:
        text = f"{totals.scored:,} scored, {totals.skipped:,} skipped"
        if self._bar is not None:
            self._bar.update(self._task, completed=totals.position, description=text)
        elif time.monotonic() - self._said > _QUIET:
            self._said = time.monotonic()
            done = totals.position / max(1, self._size)
            print(f"flashmoa score: {text}, {done:.0%} of the file", file=sys.stderr, flush=True)


def _say(totals: Totals, options: argparse.Namespace, seconds: float) -> None:
    if totals.before:
        print(f"{options.out} had the first {totals.before:,} lines already.")
    usage = totals.usage
    computed = "" if usage.computed_tokens is None else f", {usage.computed_tokens:,} computed"
    print(
        f"{totals.scored:,} lines scored in {seconds:.1f} s with {usage.requests:,} prefills: "
        f"{usage.prompt_tokens:,} prompt tokens{computed}, {usage.decoded_tokens:,} decoded"
    )
    if totals.skipped:
        print(f"{totals.skipped:,} lines were skipped; {options.errors} says why")
