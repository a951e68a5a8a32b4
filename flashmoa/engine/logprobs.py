"""Log-probabilities of what may follow a prompt, as SGLang's ``/generate`` tells them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from flashmoa.engine.refusals import aborted
from flashmoa.engine.wire import PromptUsage
from flashmoa.errors import BadAnswer

# A log-probability (none for minus infinity, and for a prompt's first token), a token, its text.
_Logprob = tuple[float | None, int, Any]


@dataclass(frozen=True, slots=True)
class NextLogprobs:
    """Natural logarithms of probabilities.

    Attributes:
        tokens: of each token that may follow.
        continuation: of each token of the continuation, given all before it.
        usage: of the prefill.
    """

    tokens: list[float]
    continuation: list[float]
    usage: PromptUsage


class Generated(BaseModel):
    """An answer of ``/generate`` with log-probabilities."""

    meta_info: dict[str, Any]

    def logprobs(self, token_ids: Sequence[int], continuation: Sequence[int]) -> NextLogprobs:
        """Raises: RequestRefused for an aborted request; BadAnswer."""
        reason: dict[str, Any] = self.meta_info.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise aborted(reason)
        try:
            told = _Told.model_validate(self.meta_info)
            after = {token: value for value, token, _ in told.after} if token_ids else {}
            following = told.input_token_logprobs[1:] if continuation else []
            if [token for _, token, _ in following] != list(continuation):
                raise BadAnswer(
                    "the engine told log-probabilities of other tokens than it was sent"
                )
            return NextLogprobs(
                [_number(after[token]) for token in token_ids],
                [_number(value) for value, _, _ in following],
                PromptUsage.model_validate(self.meta_info),
            )
        except (ValueError, LookupError) as error:
            raise BadAnswer(
                "the engine told no log-probabilities of the tokens that were asked for"
            ) from error


class _Told(BaseModel):
    input_token_logprobs: list[_Logprob] = []
    output_token_ids_logprobs: list[list[_Logprob]] = []

    @property
    def after(self) -> list[_Logprob]:
        return self.output_token_ids_logprobs[0]


def _number(value: float | None) -> float:
    return -math.inf if value is None else value
