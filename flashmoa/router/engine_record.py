"""Record what is known of an engine, and of the requests on it (`EngineRecord`); pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashmoa.router.blocks import Blocks
from flashmoa.router.engine_state import BlockTable, PrefillLoad
from flashmoa.router.policies import EngineTraits

# An engine reports blocks when it schedules them, and may have scheduled the forward after the one
# that it computes. So at most so many times its threshold is reported and not computed.
_COMPUTING = 2
# Short siblings may fill an engine up to so many times its threshold.
_SIBLINGS_FILL = 2


@dataclass(slots=True)
class EngineRecord:
    """What is known of an engine.

    Attributes:
        load: what it has not reported as computed, or answered.
        unanswered: what it has not answered.
        requests: the ids of the requests that it has.
    """

    traits: EngineTraits
    table: BlockTable
    load: PrefillLoad = field(init=False)
    unanswered: PrefillLoad = field(init=False)
    requests: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.load = PrefillLoad(self.traits.measure)
        self.unanswered = PrefillLoad(self.traits.measure)

    def add(self, request: str, start: int, blocks: Blocks) -> None:
        """Add a request whose tokens from ``start`` on are to be computed."""
        self.requests.add(request)
        for load in (self.load, self.unanswered):
            load.add(request, start, blocks.length, is_list=blocks.items > 1)

    def answer(self, request: str, until: int) -> None:
        """Note that a request's tokens before ``until`` are answered.

        What an engine answers, it has computed, though it may not have reported it.
        """
        for load in (self.load, self.unanswered):
            load.advance(request, until)

    def end(self, request: str, blocks: Blocks) -> None:
        """Forget a request that has ended, however much of it was answered."""
        self.requests.discard(request)
        self.answer(request, blocks.length)

    @property
    def backlog(self) -> int:
        """Return the work before a new request: the load, and what the engine is computing.

        A request whose answer comes late, because it is long, does not count as work for so long.
        """
        limit = self.traits.saturation
        tokens = self.unanswered.tokens - self.load.tokens
        if limit is None or not tokens:
            return self.load.total
        computing = self.unanswered.total - self.load.total
        return self.load.total + computing * min(tokens, _COMPUTING * limit) // tokens

    @property
    def is_saturated(self) -> bool:
        limit = self.traits.saturation
        return limit is not None and self.load.tokens >= limit

    @property
    def takes_siblings(self) -> bool:
        # So that not all of a burst's work is fixed to one engine while others get idle.
        limit = self.traits.saturation
        return limit is not None and self.load.tokens < _SIBLINGS_FILL * limit


@dataclass(slots=True)
class PlacedRequest:
    """A request on an engine: its first token to compute, and its prompts yet to be computed."""

    engine: EngineRecord
    blocks: Blocks
    start: int
    items_left: int
