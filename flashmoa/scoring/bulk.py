"""Score a file of any length line by line (``score_file``); a killed run can be continued."""

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
from flashmoa.scoring.lines import Line, make_record, resume
from flashmoa.scoring.scorer import Scorer
from flashmoa.scoring.scores import PrefillUsage

_BYTES_PER_BATCH = 256 * 1024
# For each line that may be scored at the same time, this many lines may have been read whose
# results are not written yet.
_LINES_AHEAD = 8

T = TypeVar("T")
R = TypeVar("R")


class RawLine(NamedTuple):
    """A line as it was read: its number from 1, the offset of its end in the file, its text."""

    number: int
    end: int
    text: bytes


class LineResult(NamedTuple):
    """The result of a line: a record, or a problem. An empty line has neither."""

    raw: RawLine
    record: dict[str, Any] | None = None
    problem: str | None = None
    usage: PrefillUsage = PrefillUsage()


@dataclass(slots=True)
class Totals:
    """Counts what a run has done so far.

    Attributes:
        scored, skipped: numbers of lines that this run has scored and skipped.
        resumed_from: number of the input's first lines that earlier runs have done.
        position: number of the input's first bytes that are done.
    """

    scored: int = 0
    skipped: int = 0
    resumed_from: int = 0
    position: int = 0
    usage: PrefillUsage = field(default_factory=PrefillUsage)


async def score_file(
    scorer: Scorer,
    source: Path,
    out: Path,
    *,
    errors: Path,
    overwrite: bool = False,
    progress: Callable[[Totals], None],
) -> Totals:
    """Score ``source`` into ``out``, from the first line on that ``out`` has no scores of.

    Records are written in the input's order. A line that is malformed, or that the engine
    refuses, is skipped and reported in ``errors``. If no line was, there is no such file. As each
    line needs a request, at most ``scorer.concurrency`` lines are scored at the same time.

    Args:
        overwrite: delete ``out`` and begin with the first line.
        progress: is called with the run's totals whenever results have been written.

    Raises:
        NotResumable: if ``out`` has other content than the scores of ``source``.
        OSError: if a file cannot be read or written.
        EngineError: if the engine cannot answer. Results that are written by then stay.
    """
    resumed_from = await to_thread.run_sync(resume, source, out, errors, overwrite)
    totals = Totals(resumed_from=resumed_from)

    async def work(raw: RawLine) -> LineResult:
        return await _score_line(scorer, raw)

    with out.open("ab") as scores, errors.open("ab", buffering=0) as report:

        def write(results: Sequence[LineResult]) -> None:
            for result in results:
                _write(result, scores, report, totals)
            scores.flush()
            progress(totals)

        async with aclosing(read_batches(source, resumed_from)) as batches:
            workers = scorer.concurrency
            ahead = _LINES_AHEAD * workers
            await OrderedWorkers(batches, work, write, workers=workers, ahead=ahead).run()
    await to_thread.run_sync(_remove_if_empty, errors)
    return totals


async def read_batches(source: Path, skip: int = 0) -> AsyncGenerator[list[RawLine]]:
    """Yield the lines of a file after the first ``skip`` lines, many at a time.

    Raises: OSError if the file cannot be read.
    """
    number = end = 0
    with await to_thread.run_sync(source.open, "rb") as file:
        while texts := await to_thread.run_sync(file.readlines, _BYTES_PER_BATCH):
            lines: list[RawLine] = []
            for text in texts:
                number, end = number + 1, end + len(text)
                if number > skip:
                    lines.append(RawLine(number, end, text))
            yield lines


async def _score_line(scorer: Scorer, raw: RawLine) -> LineResult:
    if not raw.text.strip():
        return LineResult(raw)
    try:
        line = Line.read(raw.text)
        scores = await line.score_with(scorer)
    except (ValueError, MalformedRequest, PromptTooLarge) as problem:
        return LineResult(raw, problem=str(problem))
    return LineResult(raw, make_record(raw.number, line, scores), usage=scores.usage)


def _write(result: LineResult, scores: IO[bytes], report: IO[bytes], totals: Totals) -> None:
    # A problem reaches its file before any later record does. A run that continues after some
    # record therefore finds all problems of the lines before it reported.
    if result.problem is not None:
        scores.flush()
        report.write(_encode({"line": result.raw.number, "error": result.problem}))
        totals.skipped += 1
    if result.record is not None:
        scores.write(_encode(result.record))
        totals.scored += 1
    totals.position = result.raw.end
    totals.usage += result.usage


def _encode(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def _remove_if_empty(report: Path) -> None:
    if not report.stat().st_size:
        report.unlink()


class OrderedWorkers(Generic[T, R]):
    """Works on many items at once, in bounded memory, and writes the results in the items' order.

    Args:
        batches: yields the items, several at a time. At most one batch is held in memory.
        work: called with each item.
        write: called with results as soon as those of all items before them are written.
        workers: number of items that are worked on at once.
        ahead: the most items that may have been taken without their results being written. It
            limits how many results wait in memory while one item takes long.
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
        self._progress: anyio.Event | None = None
        self._reading = anyio.Lock()
        self._has_read_all = False

    async def run(self) -> None:
        """Work until every result is written.

        Raises: Exception if reading or working on an item failed. The other workers are stopped.
        """
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
                # An event for each result would cost more time than everything else here, so
                # that one is made only when a worker waits.
                self._progress = self._progress or anyio.Event()
                await self._progress.wait()
            elif self._items:
                return True
            elif self._has_read_all:
                return False
            else:
                await self._read()

    async def _read(self) -> None:
        async with self._reading:
            if self._items or self._has_read_all:
                return  # Another worker has read a batch while this one waited for the lock.
            batch = await anext(self._batches, None)
            self._has_read_all = batch is None
            self._items.extend(batch or ())

    def _write_ready(self) -> None:
        ready: list[R] = []
        while self._written in self._results:
            ready.append(self._results.pop(self._written))
            self._written += 1
        if ready:
            self._write(ready)
        if ready and self._progress is not None:
            self._progress.set()
            self._progress = None
