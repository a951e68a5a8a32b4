"""Several routers before the same engines (`SeveralRouters`), which know nothing of each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from flashmoa.router.policies import EngineTraits, Policy, WaitingRequest
from flashmoa.router.prefix_aware import PrefixAware


class SeveralRouters(Policy):
    """Gives requests to ``count`` routers in turn, as a proxy before them does.

    Each fills engines up to its part of their threshold (``--saturation`` divided by their number).
    Engines report their blocks to all of them.
    """

    def __init__(self, count: int) -> None:
        self._routers = [PrefixAware() for _ in range(count)]
        self._router_of: dict[str, PrefixAware] = {}
        self._turn = 0

    def join(self, engine: str, traits: EngineTraits) -> None:
        if traits.saturation is not None:
            traits = replace(traits, saturation=traits.saturation // len(self._routers))
        for router in self._routers:
            router.join(engine, traits)

    def route(self, queue: Sequence[WaitingRequest]) -> dict[str, str]:
        for waiting in queue:
            if waiting.request not in self._router_of:
                self._router_of[waiting.request] = self._routers[self._turn % len(self._routers)]
                self._turn += 1
        placed: dict[str, str] = {}
        for router in self._routers:
            placed |= router.route([one for one in queue if self._router_of[one.request] is router])
        return placed

    def finish_prefill(self, request: str, items: int | None = None) -> None:
        self._router_of[request].finish_prefill(request, items)

    def end(self, request: str) -> None:
        self._router_of.pop(request).end(request)

    def add_blocks(self, engine: str, hashes: Collection[int]) -> None:
        for router in self._routers:
            router.add_blocks(engine, hashes)

    def remove_blocks(self, engine: str, hashes: Collection[int]) -> None:
        for router in self._routers:
            router.remove_blocks(engine, hashes)
