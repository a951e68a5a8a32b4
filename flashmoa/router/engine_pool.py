"""All engines together: which one has a prompt stream, and questions to all of them."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from flashmoa.router.client_requests import STREAMS, Repeat, json_object
from flashmoa.router.connections import Connections
from flashmoa.router.engines import RoutedEngine
from flashmoa.router.errors import AllEnginesRefused, EngineLost, NoEngine

_MAX_REMEMBERED = 100_000
_GONE = 410
_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class EngineReply:
    """An engine's answer to a question of the router."""

    status: int
    content: bytes
    media_type: str

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def object(self) -> dict[str, Any]:
        """Return the answer's JSON object, or an empty one if it has none."""
        return json_object(self.content)


class EnginePool:
    """The engines that are up.

    The place of a stream is soft state: a router that does not know it asks every engine.
    """

    def __init__(self, connections: Connections, engines: Mapping[str, RoutedEngine]) -> None:
        self._connections = connections
        self._engines = engines
        self._streams: OrderedDict[str, str] = OrderedDict()
        self._turn = itertools.count()

    def up(self) -> list[str]:
        return [url for url, engine in self._engines.items() if engine.is_up]

    def any(self) -> str:
        """Return one of the engines, in turn. Raises: NoEngine."""
        if not (up := self.up()):
            raise NoEngine
        return up[next(self._turn) % len(up)]

    def stream_opened(self, answer: bytes | memoryview, engine: str) -> None:
        """Remember the prompt stream that an engine's answer says it has opened, if it does."""
        stream = json_object(bytes(answer)).get("id")
        if isinstance(stream, str):
            self._remember(stream, engine)

    def forget_stream(self, stream: str) -> None:
        self._streams.pop(stream, None)

    async def engine_of(self, stream: str, headers: Mapping[str, str]) -> str | None:
        """Return the engine that has a prompt stream.

        Raises: NoEngine; AllEnginesRefused where every engine refuses the API key.
        """
        known = self._streams.get(stream)
        if known is not None:
            if self._engines[known].is_up:
                return known
            self.forget_stream(stream)
        if not (stream.isascii() and stream.isalnum()):
            return None
        replies = await self.ask("GET", f"{STREAMS}/{stream}", headers)
        for engine, reply in replies.items():
            if reply.is_success or reply.status == _GONE:
                self._remember(stream, engine)
                return engine
        refused = [reply for reply in replies.values() if reply.status in (401, 403)]
        if len(refused) == len(replies):
            raise _refused(refused[0])
        return None

    async def open_streams(self, headers: Mapping[str, str]) -> int:
        """Count the prompt streams of all engines. Raises: NoEngine; AllEnginesRefused."""
        told = [
            reply.object().get("open") for reply in await self.successes("GET", STREAMS, headers)
        ]
        return sum(count for count in told if isinstance(count, int))

    async def successes(
        self, method: str, target: str, headers: Mapping[str, str]
    ) -> list[EngineReply]:
        """Ask all engines; return the successful replies. Raises: NoEngine; AllEnginesRefused."""
        replies = list((await self.ask(method, target, headers)).values())
        if not (successes := [reply for reply in replies if reply.is_success]):
            raise _refused(replies[0])
        return successes

    async def ask(
        self, method: str, target: str, headers: Mapping[str, str]
    ) -> dict[str, EngineReply]:
        """Ask all engines that are up the same; return the replies by engine.

        Raises: NoEngine if none replies.
        """
        replies: dict[str, EngineReply] = {}

        async def ask_one(engine: str) -> None:
            try:
                with anyio.move_on_after(_SECONDS):
                    # Reading a state and emptying a cache may both be done twice.
                    answer, content = await self._connections.exchange(
                        method, engine + target, headers, b"", Repeat.ALWAYS
                    )
                    answer.close()
                    kind = answer.content_type
                    replies[engine] = EngineReply(answer.status, content or b"", kind)
            except EngineLost:
                return

        async with anyio.create_task_group() as group:
            for engine in self.up():
                group.start_soon(ask_one, engine)
        if not replies:
            raise NoEngine
        return replies

    def _remember(self, stream: str, engine: str) -> None:
        self._streams[stream] = engine
        while len(self._streams) > _MAX_REMEMBERED:
            self._streams.popitem(last=False)


def _refused(reply: EngineReply) -> AllEnginesRefused:
    return AllEnginesRefused(reply.status, reply.content, reply.media_type)


def merged_info(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge engines' ``/flashmoa/info`` into that of one engine that can do what all can."""
    capabilities = set(infos[0].get("capabilities", []))
    capabilities.intersection_update(*(one.get("capabilities", []) for one in infos))
    smallest = {
        name: min(one[name] for one in infos if one.get(name) is not None)
        for name in ("context_length", "max_prompt_tokens")
        if any(one.get(name) is not None for one in infos)
    }
    return {
        **infos[0],
        **smallest,
        "capabilities": sorted(capabilities),
        "prompt_streams": sum(one.get("prompt_streams", 0) for one in infos),
        "kv": [rank for one in infos for rank in one.get("kv", [])],
    }
