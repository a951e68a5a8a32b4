"""Read the lines of a file to score (``Line``); continue a file of scores (``resume``).

A record is a line of a file of scores, as a dictionary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flashmoa.errors import FlashMoAError
from flashmoa.scoring.questions import Context
from flashmoa.scoring.scorer import Scorer
from flashmoa.scoring.scores import Ranking, Scores, Selection

# Decimals of the numbers in a record. The order of requests changes further decimals at random.
_DIGITS = 6
# Every vocabulary is smaller than this, and every tokenizer accepts smaller ids.
_MAX_TOKENS = 1 << 31
_BEGINNING_OF_RECORD = b'{"line": '
_BYTES_PER_BLOCK = 256 * 1024

Tokens = list[Annotated[int, Field(ge=0, lt=_MAX_TOKENS)]]


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
        if line.multiple and line.options is None:
            raise BadLine("multiple goes with options only; add options, or leave multiple out")
        if line.length_normalised and line.candidates is None:
            raise BadLine(
                "length_normalised goes with candidates only; add candidates, or leave "
                "length_normalised out"
            )
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
        """Return the names of its candidates in its record, or the number of its documents."""
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
        "mass": round(scores.mass, _DIGITS),
    }


def _round(values: Iterable[float]) -> list[float | None]:
    # JSON has no number for infinity.
    return [round(value, _DIGITS) if math.isfinite(value) else None for value in values]


def _explain(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_input=False)[:3]
    return "; ".join(
        f"{'.'.join(map(str, problem['loc'])) or 'line'}: {problem['msg']}" for problem in problems
    )


def resume(source: Path, out: Path, errors: Path, overwrite: bool = False) -> int:
    """Prepare ``out`` and ``errors`` for a run that continues where the last one stopped.

    Removes incomplete last lines, and errors of lines that will be scored again.

    Args:
        overwrite: delete ``out`` first, if ``source`` can be read.

    Returns: the number from 1 of the last line of ``source`` that is done; 0 if none is.

    Raises:
        NotResumable: if ``out`` has other content than the scores of ``source``.
        OSError: if a file cannot be read or written.
    """
    with source.open("rb"):
        pass  # If the input cannot be read, no file may be deleted or made.
    if overwrite:
        out.unlink(missing_ok=True)
    last = _cut_after_last_record(out)
    if last is None:
        errors.write_bytes(b"")
        return 0
    number: int = last["line"]
    if not _is_record_of_line(last, source, number):
        raise NotResumable(
            f"{out} exists and does not have the scores of {source}; give another --out, or "
            "--overwrite"
        )
    _cut_errors(errors, number)
    return number


def _cut_after_last_record(out: Path) -> dict[str, Any] | None:
    """Cut a file after its last whole line. Return that record, ``None`` if there is none.

    Raises: NotResumable if it is not a file of scores.
    """
    if not out.exists():
        return None
    with out.open("r+b") as file:
        size = file.seek(0, 2)
        tail, start = b"", size
        while start and tail.count(b"\n") < 2:
            start = max(0, start - _BYTES_PER_BLOCK)
            file.seek(start)
            tail = file.read(size - start)
        whole, torn = tail[: tail.rfind(b"\n") + 1], tail[tail.rfind(b"\n") + 1 :]
        last = _parse_record(whole.splitlines()[-1]) if whole else None
        if (whole and last is None) or not torn.startswith(_BEGINNING_OF_RECORD[: len(torn)]):
            raise NotResumable(
                f"{out} exists and is not a file of scores; give another --out, or --overwrite"
            )
        file.truncate(start + len(whole))
    return last


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
    """Remove the errors of lines after ``number``, which are scored again."""
    errors.touch()
    with errors.open("r+b") as file:
        kept_bytes = 0
        for text in file:
            record = _parse_record(text) if text.endswith(b"\n") else None
            if record is None or record["line"] > number:
                break
            kept_bytes += len(text)
        file.truncate(kept_bytes)
