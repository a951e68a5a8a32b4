"""The lines of a file to score and of a file of scores, and where an unfinished one goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flashmoa.errors import FlashMoAError
from flashmoa.scoring.candidates import Context
from flashmoa.scoring.scorer import Scorer
from flashmoa.scoring.scores import Scores, Selection

# Numbers are written with this many digits. The order of requests changes later ones at random.
_DIGITS = 6
# No vocabulary has as many tokens, and every tokenizer accepts smaller ids.
_MAX_TOKENS = 1 << 31
# Every line of a file of scores begins so.
_BEGINNING = b'{"line": '
# Bytes read at a time, from the end.
_BLOCK = 256 * 1024

Tokens = list[Annotated[int, Field(ge=0, lt=_MAX_TOKENS)]]


class BadLine(FlashMoAError, ValueError):
    """Raised when a line cannot be scored."""


class NotResumable(FlashMoAError):
    """Raised when a file of scores is not what its input would give."""


class Line(BaseModel):
    """One line to score: a context, and what may follow it.

    ``candidates`` are for :meth:`Scorer.score`, ``labels`` for :meth:`Scorer.classify`,
    ``options`` for :meth:`Scorer.choose`, or :meth:`Scorer.select` where ``multiple``.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | int | None = None
    context: str | Tokens | None = None
    messages: list[dict[str, Any]] | None = None
    candidates: list[str | Tokens] | None = None
    labels: list[str] | dict[str, str | Tokens] | None = None
    options: list[str] | None = None
    multiple: bool = False
    length_normalised: bool = False

    @classmethod
    def read(cls, text: bytes) -> Line:
        """Parse a line of a file. Raises: BadLine."""
        try:
            line = cls.model_validate_json(text)
        except ValidationError as error:
            raise BadLine(_explained(error)) from error
        line._require_one("context", "messages")
        line._require_one("candidates", "labels", "options")
        if line.multiple and line.options is None:
            raise BadLine("multiple goes with options; add options or leave it out")
        if line.length_normalised and line.candidates is None:
            raise BadLine("length_normalised goes with candidates; add them or leave it out")
        return line

    def _require_one(self, *names: str) -> None:
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise BadLine(f"give exactly one of {', '.join(names)}; got {given or 'none'}")

    @property
    def names(self) -> list[str]:
        """Return the names of its candidates in its record."""
        given = self.labels if self.labels is not None else self.options
        if given is not None:
            return list(given)
        return [str(one) for one in self.candidates or ()]

    async def score_with(self, scorer: Scorer) -> Scores | Selection:
        """Score the line. Raises: what the scorer's methods raise."""
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


def record(number: int, line: Line, answer: Scores | Selection) -> dict[str, Any]:
    """Return the record of a line: its number from 1, its id if it has one, and its scores."""
    head: dict[str, Any] = {"line": number}
    if line.id is not None:
        head["id"] = line.id
    if isinstance(answer, Selection):
        return head | {
            "chosen": answer.chosen,
            "options": answer.options,
            "probabilities": _rounded(answer.probabilities),
            "mass": _rounded(one.mass for one in answer.answers),
        }
    return head | {
        "best": answer.best,
        "candidates": answer.candidates,
        "probabilities": _rounded(answer.probabilities),
        "logprobs": _rounded(answer.logprobs),
        "mass": round(answer.mass, _DIGITS),
    }


def is_record_of(written: Mapping[str, Any], line: Line) -> bool:
    """Return whether a record may be that of this line."""
    names = written.get("candidates", written.get("options"))
    return written.get("id") == line.id and names == line.names


def _rounded(values: Any) -> list[float | None]:
    # JSON has no number for infinity.
    return [round(one, _DIGITS) if math.isfinite(one) else None for one in values]


def _explained(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_input=False)[:3]
    parts = (f"{'.'.join(map(str, one['loc'])) or 'line'}: {one['msg']}" for one in problems)
    return "; ".join(parts)


def resume(source: Path, out: Path, errors: Path) -> int:
    """Cut ``out`` and ``errors`` behind the last line of ``source`` that is done.

    Returns: the number of that line from 1; 0 if none is done. Raises: NotResumable; OSError.
    """
    with source.open("rb"):
        pass  # An input that cannot be read must not leave empty files behind.
    last = _last_record(out)
    if last is None:
        errors.write_bytes(b"")
        return 0
    number: int = last["line"]
    if not _is_of(source, number, last):
        raise NotResumable(
            f"{out} exists and does not have the scores of {source}; give another --out, or "
            "--overwrite"
        )
    _cut_report(errors, number)
    return number


def _last_record(out: Path) -> dict[str, Any] | None:
    """Cut a file behind its last whole line, and return that record. Raises: NotResumable."""
    if not out.exists():
        return None
    with out.open("r+b") as file:
        size = file.seek(0, 2)
        tail, start = b"", size
        while start and tail.count(b"\n") < 2:
            start = max(0, start - _BLOCK)
            file.seek(start)
            tail = file.read(size - start)
        whole, torn = tail[: tail.rfind(b"\n") + 1], tail[tail.rfind(b"\n") + 1 :]
        last = _record(whole.splitlines()[-1]) if whole else None
        if (whole and last is None) or not torn.startswith(_BEGINNING[: len(torn)]):
            raise NotResumable(
                f"{out} exists and is no file of scores; give another --out, or --overwrite"
            )
        file.truncate(start + len(whole))
    return last


def _record(text: bytes) -> dict[str, Any] | None:
    try:
        fields: Any = json.loads(text)
        return fields if isinstance(fields["line"], int) else None
    except (ValueError, LookupError, TypeError):
        return None


def _is_of(source: Path, number: int, written: dict[str, Any]) -> bool:
    with source.open("rb") as file:
        for at, text in enumerate(file, start=1):
            if at == number:
                try:
                    return is_record_of(written, Line.read(text))
                except BadLine:
                    return False
    return False


def _cut_report(errors: Path, number: int) -> None:
    """Remove the errors of lines behind ``number``, which are scored again."""
    errors.touch()
    with errors.open("r+b") as file:
        kept = 0
        for text in file:
            told = _record(text) if text.endswith(b"\n") else None
            if told is None or told["line"] > number:
                break
            kept += len(text)
        file.truncate(kept)
