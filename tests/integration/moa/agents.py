"""Agents with one model and different answers, also at a proxy that fails."""

from dataclasses import replace
from typing import Any

from flashmoa.engine import EngineClient
from flashmoa.moa import AgentAnswer, Limits, Model
from tests.integration.faulty_proxy import Fault

# What the result says of an agent at the fault, without time limits in numbers.
PROBLEMS: dict[Fault, str] = {
    "down": "cannot be reached",
    "hang": "it did not begin: no token came within 0.3 s",
    "stall": "it stalled: nothing came for 0.3 s",
    "refuse": "busy",
    "garbage": "not JSON",
}
QUESTION = "How many days does one need in Kathmandu, and what for?"


def agent(engine: EngineClient, seed: int = 0, **sampling: Any) -> Model:
    """Return an agent that writes 12 tokens by default; ``seed`` picks tokens it may not use."""
    bias = {str(token): -100 for token in range(300 + 40 * seed, 340 + 40 * seed)}
    defaults = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logit_bias": bias}
    return Model(engine, sampling={**defaults, **sampling})


def faulty(proxied: EngineClient, fault: Fault, **sampling: Any) -> Model:
    """Return an agent at the proxy that loses patience soon, but only with this fault."""
    limits = Limits(first_token_seconds=0.3 if fault == "hang" else 30, stall_seconds=0.3)
    if fault not in ("hang", "stall"):
        limits = Limits(30, 30)
    return replace(agent(proxied, 9, **sampling), limits=limits)


def check_agent(record: AgentAnswer, fault: Fault) -> None:
    """Check that an agent at the fault is left out, or cut if it does not end."""
    if fault == "endless":
        assert record.status == "used" and record.finish_reason == "length" and record.text
    else:
        assert record.status == "failed" and PROBLEMS[fault] in record.problem
