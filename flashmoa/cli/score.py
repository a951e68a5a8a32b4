"""``flashmoa score INPUT.jsonl --out OUT.jsonl``: score the answers that each line of a file gives.

``flashmoa.scoring.bulk`` does the work; this module reads the arguments and shows the progress.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import anyio
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from flashmoa.engine import EngineClient
from flashmoa.engine.connections import self_hosted_url
from flashmoa.errors import EngineError
from flashmoa.scoring import Scorer
from flashmoa.scoring.bulk import NotResumable, Totals, score_file

_EPILOG = """
each line of INPUT is a JSON object with one of
  "context": text or token ids
  "messages": [...]                  in OpenAI's format
and one of
  "candidates": [...]                texts, or lists of token ids, that may follow the context
  "labels": [...] or {name: text}    candidates of one token each
  "options": [...]                   shown to the model as A, B, ...; it chooses one, or judges
                                     each separately with "multiple": true
or "query": text and "documents": [texts], which are ranked by relevance;
and optionally an "id", which its scores then have, too. After an interrupted run, the same
command without --overwrite scores the lines that have no scores yet.

exit status: 0 all lines are scored; 1 the run stopped before the end; 2 an argument is wrong;
3 some lines were skipped; 130 the run was interrupted
"""


def main(arguments: Sequence[str]) -> int:
    """Score a file. Return the exit status."""
    options = _parse_options(arguments)
    started = time.monotonic()
    try:
        with _progress(options.input.stat().st_size) as progress:
            totals = anyio.run(_score, options, progress)
    except KeyboardInterrupt:
        print(f"flashmoa score: stopped; {options.continuation}", file=sys.stderr)
        return 128 + signal.SIGINT
    except EngineError as error:  # Before OSError, which EngineTimeout is, too.
        print(f"flashmoa score: {error}\n{options.continuation}", file=sys.stderr)
        return 1
    except (NotResumable, OSError) as error:
        print(f"flashmoa score: {error}", file=sys.stderr)
        return 1
    _print_summary(totals, options, time.monotonic() - started)
    # An earlier run may have skipped lines although this one did not. score_file() removes the
    # file of errors if no run has skipped any.
    return 3 if options.errors.exists() else 0


async def _score(options: argparse.Namespace, progress: Callable[[Totals], None]) -> Totals:
    client = EngineClient(options.engine, api_key=options.api_key, timeout=options.timeout)
    async with client as engine:
        if options.overwrite:
            # Without an engine the run fails here, before score_file() deletes the old scores.
            await engine.info()
            options.continuation = "run it again without --overwrite to continue"
        scorer = Scorer(
            engine, template_args=options.template_args, concurrency=options.concurrency
        )
        return await score_file(
            scorer,
            options.input,
            options.out,
            errors=options.errors,
            overwrite=options.overwrite,
            progress=progress,
        )


def _parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="flashmoa score",
        description="Computes how likely given answers are, without decoding any.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("input", type=Path, metavar="INPUT.jsonl")
    add("--out", type=Path, required=True, metavar="OUT.jsonl")
    text = "engine URL; default: $OPENAI_BASE_URL, else http://127.0.0.1:30000"
    add("--engine", metavar="URL", help=text)
    add("--api-key", metavar="KEY", help="the key of the engine's --api-key")
    text = "most requests at the same time (default: %(default)s)"
    add("--concurrency", type=int, default=32, metavar="N", help=text)
    text = "how long to wait for the scores of a line, which come together (default: %(default)g)"
    add("--timeout", type=float, default=3600.0, metavar="SECONDS", help=text)
    text = 'arguments of the chat template, such as {"enable_thinking": false}'
    add("--template-args", type=_parse_json_object, metavar="JSON", help=text)
    add(
        "--overwrite", action="store_true", help="delete OUT and its file of errors, and start over"
    )
    parser.set_defaults(continuation="run the same command again to continue")
    options = parser.parse_args(arguments)
    out: Path = options.out
    stem = out.stem if out.suffix == ".jsonl" else out.name
    options.errors = out.with_name(f"{stem}.errors.jsonl")
    if options.concurrency < 1:
        parser.error(f"--concurrency must be at least 1, not {options.concurrency}")
    if not options.timeout > 0:
        parser.error(f"--timeout must be above 0, not {options.timeout:g}")
    if len({path.resolve() for path in (options.input, options.out, options.errors)}) < 3:
        parser.error("INPUT, OUT and the file of errors must be three different files")
    try:
        options.engine = self_hosted_url(options.engine)
    except ValueError as error:
        parser.error(str(error))
    return options


def _parse_json_object(text: str) -> Mapping[str, Any]:
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return cast("dict[str, Any]", value)


@contextmanager
def _progress(size: int) -> Generator[Callable[[Totals], None]]:
    """Show the progress in an input of ``size`` bytes: as a bar, or as lines without a terminal."""
    console = Console(stderr=True)
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    is_bar, last_report = console.is_terminal, time.monotonic()
    bar = Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not is_bar
    )
    task = bar.add_task("", total=size)

    def show(totals: Totals) -> None:
        nonlocal last_report
        text = f"{totals.scored:,} scored, {totals.skipped:,} skipped"
        bar.update(task, completed=totals.position, description=text)
        if not is_bar and time.monotonic() - last_report > 10.0:
            last_report = time.monotonic()
            done = totals.position / max(1, size)
            print(f"flashmoa score: {text}, {done:.0%} of the file", file=sys.stderr, flush=True)

    with bar:
        yield show


def _print_summary(totals: Totals, options: argparse.Namespace, seconds: float) -> None:
    if totals.resumed_from:
        print(f"{options.out} had the first {totals.resumed_from:,} lines already.")
    usage = totals.usage
    print(
        f"{totals.scored:,} lines scored in {seconds:.1f} s with {usage.requests:,} prefills: "
        f"{usage.prompt_tokens:,} prompt tokens, {usage.computed_tokens:,} computed"
    )
    if totals.skipped:
        print(f"{totals.skipped:,} lines were skipped; {options.errors} says why")
