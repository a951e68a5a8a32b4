"""An engine as it is when nothing runs, and that it is so again after every fault."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

import anyio
import httpx

from flashmoa.engine.local import LocalEngine

ANSWERING = {
    "text": "The plan so far: walk to the lake and",
    "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
}


@dataclass(frozen=True)
class Figures:
    """What must not grow. ``used``: KV tokens that are neither free nor evictable."""

    streams: int
    pinned: int
    used: int
    requests: int
    tasks: int
    sockets: int

    def above(self, other: Figures) -> bool:
        """Whether anything is more than in ``other``."""
        return any(getattr(self, item.name) > getattr(other, item.name) for item in fields(self))


def sockets(pid: int) -> int:
    """Open sockets of a process."""
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            count += os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
        except FileNotFoundError:
            continue
    return count


class Baseline:
    """Taken from an idle engine; one connection of its own, which stays open."""

    def __init__(self, engine: LocalEngine, http: httpx.AsyncClient) -> None:
        self.engine = engine
        self.http = http
        self.figures: Figures
        self.answer: str
        self._log = 0

    async def take(self) -> None:
        with anyio.fail_after(60):
            while (  # noqa: ASYNC110
                (now := await self.now()).used or now.streams or not await self.measured()
            ):
                await anyio.sleep(0.05)
        self._log = len(self.engine.log.read_text(errors="replace"))
        self.answer = await self.answered()
        self.figures = await self.now()
        # What was before may still be ending: only what stays is the baseline.
        with anyio.fail_after(30):
            while True:
                await anyio.sleep(0.3)
                earlier, self.figures = self.figures, await self.now()
                if earlier == self.figures:
                    return

    async def measured(self) -> bool:
        """Whether the engine is through with measuring itself."""
        return (await self.http.get("/flashmoa/info")).json()["costs"] is not None

    async def now(self) -> Figures:
        info: dict[str, Any] = (await self.http.get("/flashmoa/info")).json()
        kv = info["kv"][0]
        return Figures(
            streams=info["prompt_streams"],
            pinned=kv["pinned_streams"],
            used=kv["total"] - kv["free"] - kv["evictable"],
            requests=info["in_flight"]["requests"],
            tasks=info["in_flight"]["tasks"],
            sockets=sockets(self.engine.pid),
        )

    async def answered(self) -> str:
        return (await self.http.post("/generate", json=ANSWERING)).json()["text"]

    async def restored(self, seconds: float = 20.0) -> None:
        """Wait until the engine is as it was; and it answers as it did.

        Raises:
            AssertionError: it does not get there.
        """
        figures = await self.now()
        with anyio.move_on_after(seconds):
            while figures.above(self.figures):
                await anyio.sleep(0.03)
                figures = await self.now()
        assert not figures.above(self.figures), (figures, self.figures)
        # Connections of earlier tests may have been closing when the baseline was taken.
        self.figures = figures
        assert await self.answered() == self.answer
        assert self.engine.is_running()
        whole = self.engine.log.read_text(errors="replace")
        log, self._log = whole[self._log :], len(whole)
        for word in ("leak detected", "Traceback", "streams stop prefilling"):
            assert word not in log, log[max(0, log.index(word) - 2000) :][:4000]
