"""Record the state of an idle engine, and check that it returns to it after every fault."""

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
    """Figures that must not grow; ``used`` are KV tokens that are neither free nor evictable."""

    streams: int
    pinned: int
    used: int
    requests: int
    tasks: int
    sockets: int

    def above(self, other: "Figures") -> bool:
        """Return whether any figure is greater than in ``other``."""
        return any(getattr(self, item.name) > getattr(other, item.name) for item in fields(self))


def count_sockets(pid: int) -> int:
    """Return the number of open sockets of a process."""
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            count += os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
        except FileNotFoundError:
            continue
    return count


class Baseline:
    """The figures and an answer of an idle engine, read over one connection that stays open."""

    def __init__(self, engine: LocalEngine, http: httpx.AsyncClient) -> None:
        self.engine = engine
        self.http = http
        self.figures: Figures
        self.answer: str
        self._log = 0

    async def take(self) -> None:
        """Wait until the engine is idle, and record its figures and its answer."""
        with anyio.fail_after(60):
            while (  # noqa: ASYNC110
                (now := await self._read_figures()).used
                or now.streams
                or not await self._is_measured()
            ):
                await anyio.sleep(0.05)
        self._log = len(self.engine.log.read_text(errors="replace"))
        self.answer = await self._ask()
        self.figures = await self._read_figures()
        # Earlier tests may still be ending; the baseline is taken once nothing changes.
        with anyio.fail_after(30):
            while True:
                await anyio.sleep(0.3)
                earlier, self.figures = self.figures, await self._read_figures()
                if earlier == self.figures:
                    return

    async def _is_measured(self) -> bool:
        """Return whether the engine has measured its costs."""
        return (await self.http.get("/flashmoa/info")).json()["costs"] is not None

    async def _read_figures(self) -> Figures:
        info: dict[str, Any] = (await self.http.get("/flashmoa/info")).json()
        while not info["kv"]:  # The scheduler was busy for too long.
            info = (await self.http.get("/flashmoa/info")).json()
        kv = info["kv"][0]
        return Figures(
            streams=info["prompt_streams"],
            pinned=kv["pinned_streams"],
            used=kv["total"] - kv["free"] - kv["evictable"],
            requests=info["in_flight"]["requests"],
            tasks=info["in_flight"]["tasks"],
            sockets=count_sockets(self.engine.pid),
        )

    async def _ask(self) -> str:
        return (await self.http.post("/generate", json=ANSWERING)).json()["text"]

    async def wait_until_restored(self, seconds: float = 20.0) -> None:
        """Wait until no figure of the engine exceeds the baseline, then check the engine's answer.

        Raises: AssertionError if a figure exceeds the baseline after ``seconds``, if the answer
            differs, or if the engine has ended or logged an error.
        """
        figures = await self._read_figures()
        with anyio.move_on_after(seconds):
            while figures.above(self.figures):
                await anyio.sleep(0.03)
                figures = await self._read_figures()
        assert not figures.above(self.figures), (figures, self.figures)
        # Connections of earlier tests may have been closing when the baseline was taken.
        self.figures = figures
        assert await self._ask() == self.answer
        assert self.engine.is_running()
        whole = self.engine.log.read_text(errors="replace")
        log, self._log = whole[self._log :], len(whole)
        for word in ("leak detected", "Traceback", "streams stop prefilling"):
            assert word not in log, log[max(0, log.index(word) - 2000) :][:4000]
