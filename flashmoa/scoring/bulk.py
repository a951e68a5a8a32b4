"""Scoring a file of any length into another, line by line, so that it can go on after a kill."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from anyio import to_thread

from flashmoa.engine import MalformedRequest, PromptTooLarge
from flashmoa.scoring.answers import PrefillUsage
from flashmoa.scoring.lines import Line, record
from flashmoa.scoring.resuming import resume
from flashmoa.scoring.scorer import Scorer
from flashmoa.scoring.window import Window

# Bytes of lines read at a time.
_BATCH = 256 * 1024
# Lines under way and read ahead, for each that the engine works on.
_AHEAD = 8


class Raw(NamedTuple):
    """A line as it was read: its number from 1, where it ends in the file, its text."""

    number: int
    end: int
    text: bytes


class Outcome(NamedTuple):
    """What came of a line: a record, or a problem; neither for an empty one."""

    raw: Raw
    record: dict[str, Any] | None = None
    problem: str | None = None
    usage: PrefillUsage = PrefillUsage()


@dataclass(slots=True)
class Totals:
    """What has been done so far.

    Attributes:
        scored, skipped: lines, of this run. before: the last line of the runs before it.
        position: bytes of the input that are done.
    """

    scored: int = 0
    skipped: int = 0
    before: int = 0
    position: int = 0
    usage: PrefillUsage = field(default_factory=PrefillUsage)


async def score_file(
    scorer: Scorer,
    source: Path,
    out: Path,
    *,
    errors: Path,
    concurrency: int,
    progress: Callable[[Totals], None],
) -> Totals:
    """Score ``source``, going on behind what ``out`` has already.

    Records are written in the input's order. A line that is malformed, or that the engine
    refuses, is skipped and told of in ``errors``.

    Raises:
        NotResumable: see there. OSError: a file cannot be read or written.
        EngineError: the engine cannot be asked; what is written by then stays.
    """
    totals = Totals(before=await to_thread.run_sync(resume, source, out, errors))

    async def work(raw: Raw) -> Outcome:
        return await _scored(scorer, raw)

    with out.open("ab") as scores, errors.open("ab", buffering=0) as report:

        def write(outcomes: Sequence[Outcome]) -> None:
            for one in outcomes:
                _write(one, scores, report, totals)
            scores.flush()
            progress(totals)

        async with aclosing(batches(source, totals.before)) as lines:
            ahead = _AHEAD * concurrency
            await Window(lines, work, write, workers=concurrency, ahead=ahead).run()
    await to_thread.run_sync(_leave_out_if_empty, errors)
    return totals


async def batches(source: Path, skip: int = 0) -> AsyncGenerator[list[Raw]]:
    """The lines of a file behind the first ``skip``. Raises: OSError."""
    number = end = 0
    with await to_thread.run_sync(source.open, "rb") as file:
        while texts := await to_thread.run_sync(file.readlines, _BATCH):
            lines: list[Raw] = []
            for text in texts:
                number, end = number + 1, end + len(text)
                if number > skip:
                    lines.append(Raw(number, end, text))
            yield lines


async def _scored(scorer: Scorer, raw: Raw) -> Outcome:
    if not raw.text.strip():
        return Outcome(raw)
    try:
        line = Line.read(raw.text)
        answer = await line.scored(scorer)
    except (ValueError, MalformedRequest, PromptTooLarge) as problem:
        return Outcome(raw, problem=str(problem))
    return Outcome(raw, record(raw.number, line, answer), usage=answer.usage)


def _write(one: Outcome, scores: IO[bytes], report: IO[bytes], totals: Totals) -> None:
    # A problem is in its file before any later record is: going on behind a record, nothing
    # before it is told of again.
    if one.problem is not None:
        scores.flush()
        report.write(_json({"line": one.raw.number, "error": one.problem}))
        totals.skipped += 1
    if one.record is not None:
        scores.write(_json(one.record))
        totals.scored += 1
    totals.position = one.raw.end
    totals.usage += one.usage


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def _leave_out_if_empty(report: Path) -> None:
    if not report.stat().st_size:
        report.unlink()
