"""Which engine a request goes to; pure (MoE-Prefill §7 and Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine, seen by one request.

    Attributes:
        matched: tokens of the request that it need not compute.
        cost: of the rest of the request there.
        load: its outstanding work ``W``; ``promised``: of this, what computes the matched tokens.
        saturated: whether it has enough of it.
        running: requests it has; decides between engines that are alike otherwise.
    """

    engine: str
    matched: int
    cost: int
    load: int
    saturated: bool
    running: int = 0
    promised: int = 0

    @property
    def delay(self) -> int:
        """What it has to do beforehand and nobody else would have to do for the request."""
        return self.load - self.promised


def choose(candidates: Iterable[Candidate], patience: float = 0.0) -> Candidate | None:
    """Of the engines that are not saturated the one with the longest match, else the least load.

    ``None``: the request waits, because all are saturated, or because one of them is worth it: the
    work saved there, times ``patience``, is more than what it has to do beforehand, but for what
    it computes of the request's own prefix.

    With ``patience`` 0 this is the paper's rule: a popular prefix spills as soon as its engine is
    saturated. Under a queue that scatters every prefix, as whichever engine has room first takes
    the head of the queue. Work that is done twice delays everybody behind it, and not one request
    alone, so that a patience of several pays.
    """
    ordered = sorted(candidates, key=_preference)
    best = next((one for one in ordered if not one.saturated), None)
    if best is None:
        return None
    for one in ordered[: ordered.index(best)]:
        if patience and patience * (best.cost - one.cost) > one.delay - best.load:
            return None
    return best


def _preference(one: Candidate) -> tuple[int, bool, int, int]:
    return (-one.matched, one.saturated, one.load, one.running)
