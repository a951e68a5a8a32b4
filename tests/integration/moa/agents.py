"""Agents of one model whose answers differ."""

from __future__ import annotations

from typing import Any

from flashmoa.engine import EngineClient
from flashmoa.moa import DebateResult, Model

QUESTION = "How many days does one need in Kathmandu, and what for?"


def agent(engine: EngineClient, seed: int = 0, **sampling: Any) -> Model:
    """Writes 12 tokens, if not told otherwise; what it is not to say depends on the seed."""
    bias = {str(token): -100 for token in range(300 + 40 * seed, 340 + 40 * seed)}
    told = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logit_bias": bias}
    return Model(engine, sampling={**told, **sampling})


def first_letter(answer: str) -> str | None:
    return answer.strip()[:1] or None


def said(result: DebateResult) -> list[list[str]]:
    """In each round, by each debater."""
    return [[one.text for one in round_] for round_ in result.rounds]
