"""The share of engines' KV pools that links which may be in vain get."""

from __future__ import annotations

from collections.abc import Iterable

from flashmoa.engine import EngineClient
from flashmoa.linking.link import Link
from flashmoa.linking.prompt import Prompt

_CHARACTERS_PER_TOKEN = 3


class Room:
    """Of one team.

    Args:
        share: of each engine's KV pool.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        # Tokens, by the engine's URL.
        self._pools: dict[str, int] = {}

    async def has(self, engine: EngineClient, prompt: Prompt, others: Iterable[Link]) -> bool:
        """Whether a prompt fits besides those of other such links.

        Raises: EngineError.
        """
        if engine.url not in self._pools:
            self._pools[engine.url] = sum(rank.total for rank in (await engine.info()).kv)
        there = [one for one in others if one.engine.url == engine.url and not one.is_over]
        characters = sum(len(one.stable()) for one in [*(link.prompt for link in there), prompt])
        return characters <= _CHARACTERS_PER_TOKEN * self._share * self._pools[engine.url]
