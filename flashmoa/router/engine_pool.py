"""All engines together: which one has a prompt stream, and questions to all of them."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
from starlette.responses import Response

from flashmoa.router.client_requests import STREAMS, Repeat, json_object
from flashmoa.router.connections import Connections
from flashmoa.router.engines import RoutedEngine
from flashmoa.router.errors import AllEnginesRefused, EngineLost, NoEngine

_MAX_REMEMBERED = 100_000
_GONE = 410
_SECONDS = 60.0


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

    def stream_opened(self, answer: Response, engine: str) -> None:
        """Remember the prompt stream that an engine's answer says it has opened, if it does."""
        stream = json_object(answer.body).get("id")
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
            if reply.status_code in (200, _GONE):
                self._remember(stream, engine)
                return engine
        refused = [reply for reply in replies.values() if reply.status_code in (401, 403)]
        if len(refused) == len(replies):
            raise AllEnginesRefused(refused[0])
        return None

    async def open_streams(self, headers: Mapping[str, str]) -> int:
        """Count the prompt streams of all engines. Raises: NoEngine; AllEnginesRefused."""
        counts = [one.get("open") for one in await self.ask_objects(STREAMS, headers)]
        return sum(count for count in counts if isinstance(count, int))

    async def ask_objects(self, target: str, headers: Mapping[str, str]) -> list[dict[str, Any]]:
        """Get JSON objects from all engines that give one. Raises: NoEngine; AllEnginesRefused."""
        replies = list((await self.ask("GET", target, headers)).values())
        if not (given := [reply for reply in replies if reply.status_code == 200]):
            raise AllEnginesRefused(replies[0])
        return [json_object(reply.body) for reply in given]

    async def ask(
        self, method: str, target: str, headers: Mapping[str, str]
    ) -> dict[str, Response]:
        """Ask all engines that are up the same; return the replies by engine.

        Raises: NoEngine if none replies.
        """
        replies: dict[str, Response] = {}

        async def ask_one(engine: str) -> None:
            try:
                with anyio.move_on_after(_SECONDS):
                    # Reading a state and emptying a cache may both be done twice.
                    answer, content = await self._connections.exchange(
                        method, engine + target, headers, b"", Repeat.ALWAYS
                    )
                    answer.close()
                    kind = answer.content_type
                    replies[engine] = Response(content, answer.status, media_type=kind)
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
