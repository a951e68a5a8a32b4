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
        load: the engine's outstanding work ``W``.
        saturated: whether the engine has as many tokens to compute as it should have at most.
        running: number of requests on the engine; decides between engines that are otherwise equal.
        prefix_load: the part of ``load`` that computes the matched tokens.
        takes_sibling: whether the request need not wait for it although it is saturated.
    """

    engine: str
    matched: int
    cost: int
    load: int
    saturated: bool
    running: int = 0
    prefix_load: int = 0
    takes_sibling: bool = False

    @property
    def delay(self) -> int:
        """The work that precedes the request and does not compute its prefix."""
        return self.load - self.prefix_load


def choose_engine(
    candidates: Iterable[EngineCandidate], patience: float = 0.0
) -> EngineCandidate | None:
    """Choose the engine with the longest match, and among equals the one with the least load.

    Return ``None`` if the request should wait: either every engine is saturated, or a saturated one
    is worth waiting for, because the work that it saves, times ``patience``, is more than the
    additional delay there. A saturated engine that takes siblings is chosen instead.

    With ``patience`` 0 this is the paper's rule: a popular prefix spills over as soon as its engine
    is saturated. If requests queue, that scatters every prefix, because the first engine with room
    takes the head of the queue. Computing a prefix twice delays not only this request but every
    later one, so a patience greater than 1 pays.
    """
    ordered = sorted(candidates, key=lambda c: (-c.matched, c.saturated, c.load, c.running))
    best = next((candidate for candidate in ordered if not candidate.saturated), None)
    for better_match in ordered[: ordered.index(best)] if best else ordered:
        if best is not None:
            saved = best.cost - better_match.cost
            if patience * saved <= better_match.delay - best.load:
                continue
        if patience and better_match.takes_sibling:
            return better_match
        if patience and best is not None:
            return None
    return best
