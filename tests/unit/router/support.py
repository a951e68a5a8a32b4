"""Make short prompts of small blocks, policies and fake engines, for the tests of the router."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import anyio
from hypothesis import settings
from hypothesis import strategies as st
from starlette.responses import Response

from flashmoa.router.cache_tables import Blocks, EngineTraits, token_blocks
from flashmoa.router.flops import TOKENS, Measure
from flashmoa.router.forwarding import Connections
from flashmoa.router.policy import PrefixAware, WaitingRequest

SIZE = 4
STEPS = settings(max_examples=50, stateful_step_count=30)
# There are only two different tokens, so that prompts share prefixes.
PROMPTS = st.lists(st.integers(0, 1), max_size=20)
FLOPS = Measure(linear=7, pair=3, window_pair=2, window=5)
MEASURES: st.SearchStrategy[Measure] = st.sampled_from([TOKENS, FLOPS])


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


def load(routing: PrefixAware, engine: str = "e0") -> int:
    return routing.engines[engine].load.total


def place(routing: PrefixAware, name: str, prompt: Blocks) -> str | None:
    """Route a request that is alone in the queue; return its engine, or ``None`` if it waits."""
    return routing.route([WaitingRequest(name, prompt)]).get(name)


class FakeConnections(Connections):
    """Answers the router's own questions.

    Args:
        answer: returns the answer to a host and a path: an object, a status with an object, or
            ``None`` for an engine that is silent. Raises: EngineLost for one that is lost.
    """

    def __init__(self, answer: Callable[[str, str], object]) -> None:
        self._answer = answer
        self.asked: list[Any] = []

    async def ask(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes = b"",
        *,
        seconds: float,
    ) -> Response | None:
        await anyio.lowlevel.checkpoint()
        parts = urlsplit(url)
        self.asked.append(json.loads(body or b"null"))
        answer = self._answer(parts.netloc, parts.path)
        if answer is None:
            return None
        status, content = answer if isinstance(answer, tuple) else (200, answer)
        return Response(json.dumps(content), status)
