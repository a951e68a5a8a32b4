"""Lines of a file to score, and of one with scores; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flashmoa.errors import FlashMoAError
from flashmoa.scoring.answers import Scores, Selection
from flashmoa.scoring.contexts import Context
from flashmoa.scoring.scorer import Scorer

# Digits of what is written; what the order of requests changes in the last ones is not a result.
_DIGITS = 6
# More than any vocabulary has, and what every tokenizer can be asked about.
_TOKENS = 1 << 31

Tokens = list[Annotated[int, Field(ge=0, lt=_TOKENS)]]


class BadLine(FlashMoAError, ValueError):
    """Raised when a line cannot be scored; says why."""


class Line(BaseModel):
    """One line: a context, and what may follow it.

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
        """Raises: BadLine."""
        try:
            line = cls.model_validate_json(text)
        except ValidationError as error:
            raise BadLine(_explained(error)) from error
        line.one_of("context", "messages")
        line.one_of("candidates", "labels", "options")
        if line.multiple and line.options is None:
            raise BadLine("multiple goes with options")
        if line.length_normalised and line.candidates is None:
            raise BadLine("length_normalised goes with candidates")
        return line

    def one_of(self, *names: str) -> None:
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise BadLine(f"give exactly one of {', '.join(names)}; got {given or 'none'}")

    @property
    def names(self) -> list[str]:
        """What the line's answer calls its candidates."""
        given = self.labels if self.labels is not None else self.options
        if given is not None:
            return list(given)
        return [str(one) for one in self.candidates or ()]

    async def scored(self, scorer: Scorer) -> Scores | Selection:
        """Raises: as the scorer's methods."""
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
    """What is written for a line: its number from 1, its id if it has one, and the answer."""
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
    """Whether a record may be this line's."""
    names = written.get("candidates", written.get("options"))
    return written.get("id") == line.id and names == line.names


def _rounded(values: Any) -> list[float | None]:
    # JSON has no infinity.
    return [round(one, _DIGITS) if math.isfinite(one) else None for one in values]


def _explained(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_input=False)[:3]
    parts = (f"{'.'.join(map(str, one['loc'])) or 'line'}: {one['msg']}" for one in problems)
    return "; ".join(parts)
