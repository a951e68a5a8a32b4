"""Which engine has a prompt stream, and questions to all engines."""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import httpx

from flashmoa.router.dispatcher import NoEngine
from flashmoa.router.engines import Engine

_REMEMBERED = 100_000
_GONE = 410


class Fleet:
    """The engines that are up.

    Where a stream is, is soft state: a router that does not know asks every engine.
    """

    def __init__(self, http: httpx.AsyncClient, engines: Mapping[str, Engine]) -> None:
        self._http = http
        self._engines = engines
        self._streams: OrderedDict[str, str] = OrderedDict()
        self._turn = itertools.count()

    def up(self) -> list[str]:
        return [url for url, engine in self._engines.items() if engine.is_up]

    def any(self) -> str:
        """One of them, in turn. Raises: NoEngine."""
        if not (up := self.up()):
            raise NoEngine
        return up[next(self._turn) % len(up)]

    def opened(self, answer: bytes | memoryview, engine: str) -> None:
        """A prompt stream was opened there, if its engine agreed."""
        try:
            stream = json.loads(bytes(answer)).get("id")
        except (ValueError, AttributeError):
            return
        if isinstance(stream, str):
            self._remember(stream, engine)

    def forget(self, stream: str) -> None:
        self._streams.pop(stream, None)

    async def find(self, stream: str, headers: Mapping[str, str]) -> str | None:
        """The engine that has a prompt stream."""
        known = self._streams.get(stream)
        if known is not None:
            if self._engines[known].is_up:
                return known
            self.forget(stream)
        if not (stream.isascii() and stream.isalnum()):
            return None
        answers = await self.ask("GET", f"/prompt_streams/{stream}", headers)
        for engine, answer in answers.items():
            if answer.is_success or answer.status_code == _GONE:
                self._remember(stream, engine)
                return engine
        return None

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str]
    ) -> dict[str, httpx.Response]:
        """The same question to all engines that are up; the answers of those that do."""
        answers: dict[str, httpx.Response] = {}

        async def one(engine: str) -> None:
            try:
                answers[engine] = await self._http.request(
                    method, engine + path, headers=dict(headers), timeout=60.0
                )
            except httpx.HTTPError:
                return

        async with anyio.create_task_group() as group:
            for engine in self.up():
                group.start_soon(one, engine)
        return answers

    def _remember(self, stream: str, engine: str) -> None:
        self._streams[stream] = engine
        while len(self._streams) > _REMEMBERED:
            self._streams.popitem(last=False)


def merged(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Engines' own accounts as that of one engine that can do what all of them can."""
    capabilities = set(told[0].get("capabilities", []))
    capabilities.intersection_update(*(one.get("capabilities", []) for one in told))
    smallest = {
        name: min(one[name] for one in told if one.get(name) is not None)
        for name in ("context_length", "max_prompt_tokens")
        if any(one.get(name) is not None for one in told)
    }
    return {
        **told[0],
        **smallest,
        "capabilities": sorted(capabilities),
        "prompt_streams": sum(one.get("prompt_streams", 0) for one in told),
        "kv": [rank for one in told for rank in one.get("kv", [])],
    }
