"""Make short prompts of small blocks, and policies, for the tests of the router's core."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st

from flashmoa.router.blocks import Blocks, token_blocks
from flashmoa.router.flops import Measure, TokenCount, TrueFlops
from flashmoa.router.policies import EngineTraits, Policy, WaitingRequest
from flashmoa.router.prefix_aware import PrefixAware

SIZE = 4
STEPS = settings(max_examples=50, stateful_step_count=30)
# There are only two different tokens, so that prompts share prefixes.
PROMPTS = st.lists(st.integers(0, 1), max_size=20)
FLOPS = TrueFlops(linear=7, pair=3, window_pair=2, window=5)
MEASURES: st.SearchStrategy[Measure] = st.sampled_from([TokenCount(), FLOPS])


def blocks(tokens: Sequence[int]) -> Blocks:
    return token_blocks(tokens, SIZE)


def prefixes(tokens: Sequence[int]) -> set[tuple[int, ...]]:
    """Return every prefix that consists of whole blocks."""
    return {tuple(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)}


def policy(
    engines: int, measure: Measure, limit: int | None, patience: float = 0.0, short: int = 0
) -> PrefixAware:
    """Return the paper's policy for engines ``e0``, ``e1``, ..., or one with some patience."""
    routing = PrefixAware(block_tokens=SIZE, patience=patience, short=short)
    for number in range(engines):
        routing.join(f"e{number}", EngineTraits(measure, limit))
    return routing


def place(routing: Policy, name: str, prompt: Blocks) -> str | None:
    """Route a request that is alone in the queue; return its engine, or ``None`` if it waits."""
    return routing.route([WaitingRequest(name, prompt)]).get(name)
