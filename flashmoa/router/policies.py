"""Define what a routing policy learns and decides (`Policy`); pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from flashmoa.router.blocks import Blocks
from flashmoa.router.flops import TOKENS, Measure

# By how much an engine's threshold exceeds its largest forward, for the time between two forwards
# (kappa in MoE-Prefill, Eq. 3).
SATURATION_MARGIN = 1.2


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Describes an engine to a policy.

    Attributes:
        measure: measures the engine's work.
        saturation: the threshold ``T``: from how many tokens on, which the engine has yet to
            compute, its forwards are full; ``None`` if it takes every request.
        cache_blocks: the most blocks that the engine's cache holds; ``None`` if the engine reports
            every eviction itself.
    """

    measure: Measure = TOKENS
    saturation: int | None = None
    cache_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that has no engine yet. ``request`` is a unique name for it."""

    request: str
    blocks: Blocks


class Policy(Protocol):
    """Decides to which engine each request is sent. Requests are identified by unique names."""

    def join(self, engine: str, traits: EngineTraits) -> None:
        """Add an engine, or give a known one new traits."""

    def leave(self, engine: str) -> None:
        """Remove an engine, and forget its cache and its requests."""

    def takes_requests(self) -> bool:
        """Return whether some engine takes any request.

        If none does, only a request that has just come may find an engine (:meth:`route`).
        """
        return True

    def route(self, queue: Sequence[WaitingRequest]) -> dict[str, str]:
        """Return engines by request, for those requests in the queue that need not wait any longer.

        Args:
            queue: waiting requests in order of arrival.

        Raises: ValueError if a request in the queue has an engine already.
        """
        ...

    def admit(self, waiting: WaitingRequest, engine: str, cached: int | None = None) -> None:
        """Record that a request is sent to an engine; :meth:`route` does so for those it places.

        Args:
            cached: number of tokens of its prompt that the engine has cached; by default, those
                that match.

        Raises: ValueError if the request has an engine already.
        """

    def end(self, request: str) -> None:
        """Forget a request, whether its prompt is computed or not; harmless to repeat."""

    def finish_prefill(self, request: str, items: int | None = None) -> None:
        """Record that a request's prompt is computed; harmless to repeat.

        Args:
            items: of a request with a list, how many of its prompts are computed in addition to
                those reported before; by default, all of them.
        """

    def add_blocks(self, engine: str, hashes: Collection[int]) -> None:
        """Record that an engine has cached blocks, and so has computed those that were pending."""

    def remove_blocks(self, engine: str, hashes: Collection[int]) -> None:
        """Record that an engine has evicted blocks."""

    def clear_blocks(self, engine: str) -> None:
        """Record that an engine's cache is empty."""
