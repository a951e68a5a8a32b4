"""What a routing policy is told, and what it answers; pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flashmoa.router.blocks import Blocks
from flashmoa.router.flops import Measure, TokenCount


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What is known of an engine.

    Attributes:
        measure: of its work.
        saturation: ``T``, in that measure; ``None``: it takes everything.
        cache_blocks: what its cache holds at most; ``None``: it reports every eviction itself.
    """

    measure: Measure = field(default_factory=TokenCount)
    saturation: int | None = None
    cache_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that has no engine yet."""

    request: str
    blocks: Blocks


class Policy(Protocol):
    """Says where requests go. A request is known by a name of its own until it is ended.

    Engines come with ``join``, again with new traits, and go with ``leave``, which forgets all that
    was known of them and of their requests.
    """

    def join(self, engine: str, traits: EngineTraits) -> None: ...

    def leave(self, engine: str) -> None: ...

    def route(self, queue: Sequence[Waiting]) -> dict[str, str]:
        """One scheduling round: the engines of those requests that need not wait any longer.

        ``queue``: in order of arrival. Raises: ValueError for a request that has an engine.
        """
        ...

    def admit(self, one: Waiting, engine: str, cached: int | None = None) -> None:
        """A request that an engine, which has joined, gets without having been routed.

        Args:
            cached: tokens of its prompt that the engine has; ``None``: those that match.

        Raises: ValueError for a request that has an engine.
        """
        ...

    def computed(self, request: str) -> None:
        """The request's prompt is computed."""
        ...

    def end(self, request: str) -> None:
        """The request is over, computed or not; harmless to repeat."""
        ...

    def stored(self, engine: str, hashes: Collection[int]) -> None:
        """Blocks are in an engine's cache; it has computed those that were promised."""
        ...

    def removed(self, engine: str, hashes: Collection[int]) -> None:
        """Blocks are no longer in an engine's cache."""
        ...

    def cleared(self, engine: str) -> None:
        """An engine's cache is empty."""
        ...
