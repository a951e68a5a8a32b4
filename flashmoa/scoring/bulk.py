"""Score a file of any length line by line (``score_file``). A killed run can be continued.

A :class:`Line` is a line of the input. A record is a line of the file of scores, as a dictionary.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple, TypeVar

import anyio
from anyio import to_thread
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flashmoa._concurrency import all_of
from flashmoa.errors import FlashMoAError, RequestRefused
from flashmoa.scoring.contexts import Context
from flashmoa.scoring.scorer import Scorer
from flashmoa.scoring.scores import PrefillUsage, Ranking, Scores, Selection

# Decimals of the numbers in a record. Later decimals vary with the order of requests.
_DECIMALS = 6
_BEGINNING_OF_RECORD = b'{"line": '
# For each line that is scored at the same time, this number of lines may have been read without
# their results being written.
_LINES_AHEAD = 8

# Every vocabulary is smaller than the limit, and every tokenizer accepts smaller ids.
Tokens = list[Annotated[int, Field(ge=0, lt=1 << 31)]]
T = TypeVar("T")
R = TypeVar("R")


class BadLine(FlashMoAError, ValueError):
    """Raised when a line cannot be scored."""


class NotResumable(FlashMoAError):
    """Raised when a file of scores does not belong to its input, or is not a file of scores."""


class Line(BaseModel):
    """One line to score: a context, and answers that may follow it.

    ``candidates`` are for :meth:`Scorer.score`, ``labels`` for :meth:`Scorer.classify`,
    ``options`` for :meth:`Scorer.choose` or, with ``multiple``, for :meth:`Scorer.select`;
    ``query`` and ``documents`` are for :meth:`Scorer.rerank`.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | int | None = None
    context: str | Tokens | None = None
    messages: list[dict[str, Any]] | None = None
    candidates: list[str | Tokens] | None = None
    labels: list[str] | dict[str, str | Tokens] | None = None
    options: list[str] | None = None
    query: str | None = None
    documents: list[str] | None = None
    multiple: bool = False
    length_normalised: bool = False

    @classmethod
    def read(cls, text: bytes) -> Line:
        """Parse a line of a file. Raises: BadLine if it is malformed."""
        try:
            line = cls.model_validate_json(text)
        except ValidationError as error:
            raise BadLine(_explain(error)) from error
        if line.query is not None or line.documents is not None:
            line._check_ranking()
            return line
        line._require_one("context", "messages")
        line._require_one("candidates", "labels", "options")
        for name, kind in (("multiple", "options"), ("length_normalised", "candidates")):
            if getattr(line, name) and getattr(line, kind) is None:
                raise BadLine(f"{name} goes with {kind} only; add {kind}, or leave {name} out")
        return line

    def _check_ranking(self) -> None:
        others = self.model_fields_set - {"id", "query", "documents"}
        if not self.documents or self.query is None or others:
            raise BadLine(
                "query and documents go together, without other fields; got "
                f"{sorted(self.model_fields_set)}"
            )

    def _require_one(self, *names: str) -> None:
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise BadLine(f"give exactly one of {', '.join(names)}; got {given or 'none'}")

    @property
    def names(self) -> list[str] | int:
        """The candidates' names in the line's record, or the number of documents."""
        if self.documents is not None:
            return len(self.documents)
        given = self.labels if self.labels is not None else self.options
        if given is not None:
            return list(given)
        return [str(candidate) for candidate in self.candidates or ()]

    async def score_with(self, scorer: Scorer) -> Scores | Selection | Ranking:
        """Score the line. Raises: the exceptions of :class:`Scorer`'s methods."""
        if self.query is not None:
            return await scorer.rerank(self.query, self.documents or [])
        context: Context = self.context if self.context is not None else self.messages or []
        if self.labels is not None:
            return await scorer.classify(context, self.labels)
        if self.options is None:
            return await scorer.score(
                context, self.candidates or [], length_normalised=self.length_normalised
            )
        if self.multiple:
            return await scorer.select(context, self.options)
        return await scorer.choose(context, self.options)


def make_record(number: int, line: Line, scores: Scores | Selection | Ranking) -> dict[str, Any]:
    """Return the record of a line: its number from 1, its id if it has one, and its scores."""
    head: dict[str, Any] = {"line": number}
    if line.id is not None:
        head["id"] = line.id
    if isinstance(scores, Ranking):
        return head | {
            "documents": line.names,
            "ranked": [document.index for document in scores.documents],
            "scores": _round(document.score for document in scores.documents),
        }
    if isinstance(scores, Selection):
        return head | {
            "chosen": scores.chosen,
            "options": scores.options,
            "probabilities": _round(scores.probabilities),
            "mass": _round(answer.mass for answer in scores.answers),
        }
    return head | {
        "best": scores.best,
        "candidates": scores.candidates,
        "probabilities": _round(scores.probabilities),
        "logprobs": _round(scores.logprobs),
        "mass": round(scores.mass, _DECIMALS),
    }


def _round(values: Iterable[float]) -> list[float | None]:
    # JSON has no number for infinity.
    return [round(value, _DECIMALS) if math.isfinite(value) else None for value in values]


def _explain(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_input=False)[:3]
    return "; ".join(
        f"{'.'.join(map(str, problem['loc'])) or 'line'}: {problem['msg']}" for problem in problems
    )


def resume(source: Path, out: Path, errors: Path, overwrite: bool = False) -> int:
    """Prepare ``out`` and ``errors`` for a run that continues where the last one stopped.

    Remove incomplete last lines, and the errors of lines that will be scored again. To
    ``overwrite``, delete both files first, if ``source`` can be read. Return the number of lines of
    ``source`` that are done.

    Raises:
        NotResumable: if ``out`` has other content than the scores of ``source``, or ``errors`` is
            another kind of file.
        OSError: if a file cannot be read or written.
    """
    with source.open("rb"):
        pass  # If the input cannot be read, no file may be deleted or created.
    if overwrite:
        out.unlink(missing_ok=True)
        errors.unlink(missing_ok=True)
    elif errors.exists():
        _last_record(errors)
    number = 0
    if out.exists():
        last, size = _last_record(out)
        number = last["line"] if last else 0
        if last and not _is_record_of_line(last, source, number):
            raise NotResumable(
                f"{out} exists and does not have the scores of {source}; give another --out, or "
                "--overwrite"
            )
        os.truncate(out, size)
    _cut_errors(errors, number)
    return number


def _last_record(out: Path) -> tuple[dict[str, Any] | None, int]:
    """Return a file's last whole record, if any, and the size up to its end.

    Raises: NotResumable if it is not a file of scores or errors.
    """
    last, size, torn = b"", 0, b""
    with out.open("rb") as file:
        for text in file:
            if text.endswith(b"\n"):
                last, size = text, size + len(text)
            else:
                torn = text
    record = _parse_record(last)
    if (last and record is None) or not torn.startswith(_BEGINNING_OF_RECORD[: len(torn)]):
        raise NotResumable(
            f"{out} exists and is not a file of scores or errors; give another --out, or "
            "--overwrite"
        )
    return record, size


def _parse_record(text: bytes) -> dict[str, Any] | None:
    try:
        fields: Any = json.loads(text)
        return fields if isinstance(fields["line"], int) else None
    except (ValueError, LookupError, TypeError):
        return None


def _is_record_of_line(record: dict[str, Any], source: Path, number: int) -> bool:
    """Return whether a record has the id and the candidates of a line, counted from 1."""
    with source.open("rb") as file:
        text = next(islice(file, number - 1, None), b"") if number > 0 else b""
    try:
        line = Line.read(text)
    except BadLine:
        return False
    names = record.get("candidates", record.get("options", record.get("documents")))
    return record.get("id") == line.id and names == line.names


def _cut_errors(errors: Path, number: int) -> None:
    """Remove the errors of lines after ``number``. These lines are scored again."""
    errors.touch()
    with errors.open("r+b") as file:
        kept_bytes = 0
        for text in file:
            record = _parse_record(text) if text.endswith(b"\n") else None
            if record is None or record["line"] > number:
                break
            kept_bytes += len(text)
        file.truncate(kept_bytes)


class RawLine(NamedTuple):
    """An unparsed line: its number from 1, the offset of its end in the file, and its text."""

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
    """Counts the progress of a run.

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
    """Score the lines of ``source`` that have no scores in ``out``, and append these to ``out``.

    Records are written in the input's order. A line that is malformed, or that the engine refuses,
    is skipped and reported in ``errors``. If no line was skipped, there is no such file. As each
    line needs a request, at most ``scorer.concurrency`` lines are scored at the same time.

    Args:
        overwrite: delete ``out`` and ``errors``, and begin with the first line.
        progress: called with the run's totals whenever results have been written.

    Raises:
        NotResumable: if ``out`` has other content than the scores of ``source``, or ``errors`` is
            another kind of file.
        OSError: if a file cannot be read or written.
        EngineError: if the engine cannot answer. Results already written stay.
    """
    resumed_from = await to_thread.run_sync(resume, source, out, errors, overwrite)
    totals = Totals(resumed_from=resumed_from)
    with out.open("ab") as scores, errors.open("ab", buffering=0) as report:

        def write(results: Sequence[LineResult]) -> None:
            for result in results:
                _write(result, scores, report, totals)
            scores.flush()
            progress(totals)

        async with aclosing(read_batches(source, resumed_from)) as batches:
            work, workers = partial(_score_line, scorer), scorer.concurrency
            await work_in_order(batches, work, write, workers, _LINES_AHEAD * workers)
    if not errors.stat().st_size:  # noqa: ASYNC240 - as quick as the writes above
        errors.unlink()  # noqa: ASYNC240
    return totals


async def read_batches(source: Path, skip: int = 0) -> AsyncGenerator[list[RawLine]]:
    """Yield the lines of a file after the first ``skip`` lines, many at a time.

    Raises: OSError if the file cannot be read.
    """
    number = end = 0
    with await to_thread.run_sync(source.open, "rb") as file:
        while texts := await to_thread.run_sync(file.readlines, 256 * 1024):
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
    except (ValueError, RequestRefused) as problem:
        if isinstance(problem, RequestRefused) and not problem.blames_request:
            raise
        return LineResult(raw, problem=str(problem))
    return LineResult(raw, make_record(raw.number, line, scores), usage=scores.usage)


def _write(result: LineResult, scores: IO[bytes], report: IO[bytes], totals: Totals) -> None:
    # A problem reaches its file before any later record. So all problems before a record are
    # reported when another run continues after this record.
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


async def work_in_order(
    batches: AsyncIterator[Sequence[T]],
    work: Callable[[T], Awaitable[R]],
    write: Callable[[Sequence[R]], None],
    workers: int,
    ahead: int,
) -> None:
    """Work on several items at once, in bounded memory, and write the results in the items' order.

    ``batches`` yields several items at a time. ``write`` is called with results as soon as all
    earlier results are written. At most ``ahead`` items are taken without written results, which
    limits the results in memory while one item takes long.

    Raises: Exception if reading or working on an item failed. The other workers are stopped.
    """
    turn, room = anyio.Lock(fast_acquire=True), anyio.Semaphore(ahead, fast_acquire=True)
    results: dict[int, R] = {}
    written = 0

    async def take() -> AsyncGenerator[tuple[int, T]]:
        number = 0
        async for batch in batches:
            for item in batch:
                await room.acquire()
                yield number, item
                number += 1

    async def run() -> None:
        nonlocal written
        while True:
            async with turn:
                taken = await anext(items, None)
            if taken is None:
                return
            number, item = taken
            results[number] = await work(item)
            ready: list[R] = []
            while written in results:
                ready.append(results.pop(written))
                written += 1
                room.release()
            if ready:
                write(ready)

    async with aclosing(take()) as items:
        await all_of([run] * workers)
