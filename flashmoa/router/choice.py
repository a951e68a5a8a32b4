"""Choose the engine of one request (`choose_engine`); pure (MoE-Prefill §7.3, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineCandidate:
    """Describes an engine from the point of view of one request.

    Attributes:
        engine: the engine's name.
        matched: number of the request's tokens that the engine need not compute.
        cost: work to compute the rest of the request on the engine.
        load: the engine's outstanding work ``W``, with what it is computing.
        saturated: whether the engine has as many tokens to compute as it should have at most.
        running: number of requests on the engine; decides between engines that are otherwise equal.
        prefix_load: the part of ``load`` that computes the matched tokens.
        queued: work of the requests that wait for the engine already.
        is_popular: whether its requests with the matched prefix are more work than the prefix.
        takes_sibling: whether the request need not wait for it although it is saturated.
    """

    engine: str
    matched: int
    cost: int
    load: int
    saturated: bool
    running: int = 0
    prefix_load: int = 0
    queued: int = 0
    is_popular: bool = False
    takes_sibling: bool = False

    @property
    def delay(self) -> int:
        """Return the work that precedes the request and does not compute its prefix."""
        return self.load + self.queued - self.prefix_load


def choose_engine(
    candidates: Iterable[EngineCandidate], patience: float = 0.0
) -> EngineCandidate | None:
    """Choose the engine with the least delay plus ``patience`` times the work on it.

    So a match is worth a longer queue as long as the work that it saves, times ``patience``, is
    more than the additional delay. Return ``None`` if the request should wait: either every engine
    is saturated, or a saturated one has a longer match that is worth it. A saturated engine that
    takes siblings is chosen instead. Of equal engines, the one with the longest match is chosen,
    then the one with the least load.

    A popular prefix is worth no patience: another engine that computes it once more relieves the
    first one of more work than that. So such a request goes where it is finished first.

    With ``patience`` 0 this is the paper's rule: the longest match of those that are not saturated,
    and of equal matches the least load. If requests queue, that scatters every prefix, because the
    first engine with room takes the head of the queue, and computing a prefix twice delays every
    later request; so a patience greater than 1 pays. If all prompts begin with a few equal tokens,
    that rule sends them to the engines that have these, and others get nothing.
    """
    ordered = sorted(candidates, key=lambda c: (-c.matched, c.saturated, c.load, c.running))
    free = [candidate for candidate in ordered if not candidate.saturated]
    if not patience:
        return free[0] if free else None
    if any(one.is_popular for one in ordered if one.matched == ordered[0].matched):
        patience = min(patience, 1.0)

    def price(candidate: EngineCandidate) -> float:
        return candidate.delay + patience * candidate.cost

    best = min(free, key=price, default=None)
    worth = [
        one
        for one in ordered
        if one.saturated
        and (best is None or (one.matched > best.matched and price(one) < price(best)))
    ]
    if not worth:
        return best
    nearest = min(worth, key=price)
    return nearest if nearest.takes_sibling else None
