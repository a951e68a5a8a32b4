"""Scoring a file of any length into another, line by line, so that a killed run can go on."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, TypeVar

import anyio
from anyio import to_thread

from flashmoa._concurrency import all_of
from flashmoa.engine import MalformedRequest, PromptTooLarge
from flashmoa.scoring.lines import Line, record, resume
from flashmoa.scoring.scorer import Scorer
from flashmoa.scoring.scores import PrefillUsage

# Bytes of lines read at a time.
_BATCH = 256 * 1024
# For each line that the engine works on, this many may be under way or read ahead.
_AHEAD = 8

T = TypeVar("T")
R = TypeVar("R")


class RawLine(NamedTuple):
    """A line as it was read: its number from 1, its end in the file, its text."""

    number: int
    end: int
    text: bytes


class LineResult(NamedTuple):
    """The result of a line: a record, or a problem; neither for an empty line."""

    raw: RawLine
    record: dict[str, Any] | None = None
    problem: str | None = None
    usage: PrefillUsage = PrefillUsage()


@dataclass(slots=True)
class Totals:
    """How far a run is.

    Attributes:
        scored, skipped: the lines of this run.
        before: the number of lines that earlier runs have done.
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
    """Score ``source`` into ``out``, from behind the last line that ``out`` has already.

    Records are written in the input's order. A line that is malformed, or that the engine
    refuses, is skipped and reported in ``errors``.

    Raises:
        NotResumable: ``out`` has something else than the scores of ``source``.
        OSError: a file cannot be read or written.
        EngineError: the engine cannot be asked; what is written by then stays.
    """
    totals = Totals(before=await to_thread.run_sync(resume, source, out, errors))

    async def work(raw: RawLine) -> LineResult:
        return await _scored(scorer, raw)

    with out.open("ab") as scores, errors.open("ab", buffering=0) as report:

        def write(outcomes: Sequence[LineResult]) -> None:
            for one in outcomes:
                _write(one, scores, report, totals)
            scores.flush()
            progress(totals)

        async with aclosing(batches(source, totals.before)) as lines:
            ahead = _AHEAD * concurrency
            await OrderedWorkers(lines, work, write, workers=concurrency, ahead=ahead).run()
    await to_thread.run_sync(_remove_if_empty, errors)
    return totals


async def batches(source: Path, skip: int = 0) -> AsyncGenerator[list[RawLine]]:
    """Yield the lines of a file behind the first ``skip``. Raises: OSError."""
    number = end = 0
    with await to_thread.run_sync(source.open, "rb") as file:
        while texts := await to_thread.run_sync(file.readlines, _BATCH):
            lines: list[RawLine] = []
            for text in texts:
                number, end = number + 1, end + len(text)
                if number > skip:
                    lines.append(RawLine(number, end, text))
            yield lines


async def _scored(scorer: Scorer, raw: RawLine) -> LineResult:
    if not raw.text.strip():
        return LineResult(raw)
    try:
        line = Line.read(raw.text)
        answer = await line.score_with(scorer)
    except (ValueError, MalformedRequest, PromptTooLarge) as problem:
        return LineResult(raw, problem=str(problem))
    return LineResult(raw, record(raw.number, line, answer), usage=answer.usage)


def _write(one: LineResult, scores: IO[bytes], report: IO[bytes], totals: Totals) -> None:
    # A problem reaches its file before any later record does, so a run that goes on behind a
    # record reports no problem before it again.
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


def _remove_if_empty(report: Path) -> None:
    if not report.stat().st_size:
        report.unlink()


class OrderedWorkers(Generic[T, R]):
    """Work on many items at once, in bounded memory, with the results in the items' order.

    Args:
        batches: the items, several at a time. Only one batch is held; the next is read when needed.
        work: is done on each item, on ``workers`` of them at once.
        write: is given results as soon as they are the next ones.
        ahead: how many items may be taken whose results are not written yet: how far the others
            get while one item takes long.
    """

    def __init__(
        self,
        batches: AsyncIterator[Sequence[T]],
        work: Callable[[T], Awaitable[R]],
        write: Callable[[Sequence[R]], None],
        *,
        workers: int,
        ahead: int,
    ) -> None:
        self._batches = batches
        self._work = work
        self._write = write
        self._workers = workers
        self._ahead = ahead
        self._items: deque[T] = deque()
        self._taken = self._written = 0
        self._results: dict[int, R] = {}
        self._moved: anyio.Event | None = None
        self._reading = anyio.Lock()
        self._is_over = False

    async def run(self) -> None:
        """Work until every result is written. Raises: what reading or work raises, at once."""
        await all_of([self._worker] * self._workers)

    async def _worker(self) -> None:
        while await self._has_next():
            index, item = self._taken, self._items.popleft()
            self._taken += 1
            self._results[index] = await self._work(item)
            self._write_ready()

    async def _has_next(self) -> bool:
        while True:
            if self._taken - self._written >= self._ahead:
                # It is made only where a worker waits, because it would cost more than the rest.
                self._moved = self._moved or anyio.Event()
                await self._moved.wait()
            elif self._items:
                return True
            elif self._is_over:
                return False
            else:
                await self._read()

    async def _read(self) -> None:
        async with self._reading:
            if self._items or self._is_over:
                return  # Another worker has read meanwhile.
            batch = await anext(self._batches, None)
            self._is_over = batch is None
            self._items.extend(batch or ())

    def _write_ready(self) -> None:
        ready: list[R] = []
        while self._written in self._results:
            ready.append(self._results.pop(self._written))
            self._written += 1
        if ready:
            self._write(ready)
        if ready and self._moved is not None:
            self._moved.set()
            self._moved = None
