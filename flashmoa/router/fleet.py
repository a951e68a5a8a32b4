"""Which engine has a prompt stream, and questions to all engines."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from flashmoa.errors import FlashMoAError
from flashmoa.router.bodies import json_object
from flashmoa.router.connections import Connections, EngineLost
from flashmoa.router.dispatcher import NoEngine
from flashmoa.router.engines import Engine
from flashmoa.router.paths import STREAMS, Repeat

_REMEMBERED = 100_000
_GONE = 410
_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Told:
    """An engine's answer to a question; ``form``: its content type."""

    status: int
    content: bytes
    form: str

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def object(self) -> dict[str, Any]:
        """As a JSON object; nothing where it is none."""
        return json_object(self.content)


class Refused(FlashMoAError):
    """Raised when every engine refuses; ``told`` is the answer of one of them."""

    def __init__(self, told: Told) -> None:
        super().__init__(f"engines answer {told.status}")
        self.told = told


class Fleet:
    """The engines that are up.

    Where a stream is, is soft state: a router that does not know asks every engine.
    """

    def __init__(self, connections: Connections, engines: Mapping[str, Engine]) -> None:
        self._connections = connections
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
        stream = json_object(bytes(answer)).get("id")
        if isinstance(stream, str):
            self._remember(stream, engine)

    def forget(self, stream: str) -> None:
        self._streams.pop(stream, None)

    async def find(self, stream: str, headers: Mapping[str, str]) -> str | None:
        """The engine that has a prompt stream. Raises: NoEngine; Refused, where none lets in."""
        known = self._streams.get(stream)
        if known is not None:
            if self._engines[known].is_up:
                return known
            self.forget(stream)
        if not (stream.isascii() and stream.isalnum()):
            return None
        answers = await self.ask("GET", f"{STREAMS}/{stream}", headers)
        for engine, answer in answers.items():
            if answer.is_success or answer.status == _GONE:
                self._remember(stream, engine)
                return engine
        refused = [answer for answer in answers.values() if answer.status in (401, 403)]
        if len(refused) == len(answers):
            raise Refused(refused[0])
        return None

    async def open_streams(self, headers: Mapping[str, str]) -> int:
        """How many prompt streams all engines have. Raises: NoEngine; Refused."""
        told = [
            answer.object().get("open") for answer in await self.agreed("GET", STREAMS, headers)
        ]
        return sum(count for count in told if isinstance(count, int))

    async def agreed(self, method: str, target: str, headers: Mapping[str, str]) -> list[Told]:
        """The answers of engines that do what all are asked. Raises: NoEngine; Refused."""
        answers = list((await self.ask(method, target, headers)).values())
        if not (agreed := [answer for answer in answers if answer.is_success]):
            raise Refused(answers[0])
        return agreed

    async def ask(self, method: str, target: str, headers: Mapping[str, str]) -> dict[str, Told]:
        """The same question to all engines that are up; the answers of those that answer.

        Raises: NoEngine if none does.
        """
        answers: dict[str, Told] = {}

        async def one(engine: str) -> None:
            try:
                with anyio.move_on_after(_SECONDS):
                    answers[engine] = await self._told(method, engine + target, headers)
            except EngineLost:
                return

        async with anyio.create_task_group() as group:
            for engine in self.up():
                group.start_soon(one, engine)
        if not answers:
            raise NoEngine
        return answers

    async def _told(self, method: str, url: str, headers: Mapping[str, str]) -> Told:
        # Asking for a state, and emptying a cache, may be done twice.
        answer, content = await self._connections.exchange(method, url, headers, b"", Repeat.ALWAYS)
        answer.close()
        return Told(answer.status, content or b"", answer.content_type)

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
