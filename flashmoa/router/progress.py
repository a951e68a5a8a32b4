"""Prompts whose answers come whole: their engine is asked whether they are computed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx

from flashmoa.router.dispatcher import Place

_EVERY_SECONDS = 0.25
# Where an engine does not say.
_SELDOM_SECONDS = 5.0
# The first snapshot after a request may be of a forward that was under way when it came.
_LATER = 2


@dataclass(slots=True)
class _Followed:
    place: Place
    # Of the last snapshot, by the engine's clock; and how many came after the first one.
    made: float | None = None
    later: int = 0

    def saw(self, made: float) -> bool:
        """Whether this snapshot knows of it for certain."""
        self.later += self.made is not None and made > self.made
        self.made = made
        return self.later >= _LATER


class Progress:
    """One engine's requests of which nothing is heard until they are over.

    An engine that decodes them for minutes has long computed their prompts, and has room for
    others. SGLang says how many requests still wait (``GET /v1/loads``), in snapshots that it makes
    as it goes; it takes them in order, about.
    """

    def __init__(self, http: httpx.AsyncClient, engine: str) -> None:
        self._http = http
        self._url = f"{engine}/v1/loads?include=core"
        # By request, in the order in which they were sent.
        self._followed: dict[str, _Followed] = {}
        self._some = anyio.Event()

    @contextmanager
    def follow(self, place: Place) -> Generator[None]:
        """Until it is over: tell its place once its prompt is computed."""
        self._followed[place.request] = _Followed(place)
        self._some.set()
        try:
            yield
        finally:
            self._followed.pop(place.request, None)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._some = anyio.Event()
            if not self._followed:
                await self._some.wait()
            await anyio.sleep(_EVERY_SECONDS)
            if self._followed and not await self._ask():
                await anyio.sleep(_SELDOM_SECONDS)

    async def _ask(self) -> bool:
        try:
            answer = await self._http.get(self._url)
            loads: list[dict[str, Any]] = answer.raise_for_status().json()["loads"]
            waiting = sum(int(one["num_waiting_reqs"]) for one in loads)
            made = max(float(one["timestamp"]) for one in loads)
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return False
        self.told(waiting, made)
        return True

    def told(self, waiting: int, made: float) -> None:
        """A snapshot. ``waiting``: requests whose prompt is not begun; ``made``: seconds."""
        seen = [one for one in self._followed.values() if one.saw(made)]
        for one in seen[: max(0, len(seen) - waiting)]:
            del self._followed[one.place.request]
            one.place.computed()
