"""Agents with one model and different answers."""

from __future__ import annotations

from typing import Any

from flashmoa.engine import EngineClient
from flashmoa.moa import Model, Result

QUESTION = "How many days does one need in Kathmandu, and what for?"


def agent(engine: EngineClient, seed: int = 0, **sampling: Any) -> Model:
    """Return an agent that writes 12 tokens by default; ``seed`` picks tokens it may not use."""
    bias = {str(token): -100 for token in range(300 + 40 * seed, 340 + 40 * seed)}
    defaults = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logit_bias": bias}
    return Model(engine, sampling={**defaults, **sampling})


async def read_answer(system: Any) -> tuple[str, Any]:
    """Ask a system the question. Return what it streams, and its result."""
    async with system.answering(QUESTION) as run:
        pieces = [piece async for piece in run]
        return "".join(pieces), await run.result()


def first_letter(answer: str) -> str | None:
    return answer.strip()[:1] or None


def answers_by_round(result: Result) -> list[list[str]]:
    """Return the answers of each round, by debater."""
    return [[answer.text for answer in round_] for round_ in result.layers]
