"""Send requests to all engines, and find the engine that has a prompt stream (`EnginePool`)."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
from starlette.responses import Response

from flashmoa.router.client_requests import STREAMS, RetryRule, parse_object
from flashmoa.router.connections import Connections
from flashmoa.router.engines import RoutedEngine, split_place
from flashmoa.router.errors import AllEnginesRefused, EngineLost, NoEngine

_MAX_REMEMBERED_STREAMS = 100_000
# The status of a stream that the engine had and no longer has.
_GONE = 410
_TIMEOUT_SECONDS = 60.0
# How long a request waits to learn which engine has its prompt stream. It runs without, too.
_LOOKUP_SECONDS = 5.0


class EnginePool:
    """Sends requests to the engines that are up, and remembers the places of prompt streams.

    It asks every engine for a stream that it does not remember, for example after a restart.
    """

    def __init__(self, connections: Connections, engines: Mapping[str, RoutedEngine]) -> None:
        self._connections = connections
        self._engines = engines
        self._stream_places: OrderedDict[str, str] = OrderedDict()
        self._turn = itertools.count()

    def urls_up(self) -> list[str]:
        """Return the URLs of the engines that are up."""
        return [url for url, engine in self._engines.items() if engine.is_up]

    def next_engine(self) -> str:
        """Return the URL of an engine, each in turn. Raises: NoEngine if none is up."""
        if not (urls := self.urls_up()):
            raise NoEngine
        return urls[next(self._turn) % len(urls)]

    def remember_stream(self, stream: object, place: str) -> None:
        """Remember the place of a prompt stream; ignore a ``stream`` that is not a string."""
        if isinstance(stream, str):
            self._stream_places[stream] = place
        while len(self._stream_places) > _MAX_REMEMBERED_STREAMS:
            self._stream_places.popitem(last=False)

    def forget_stream(self, stream: str) -> None:
        self._stream_places.pop(stream, None)

    async def place_of_stream(self, stream: str, headers: Mapping[str, str]) -> str | None:
        """Return the place of a prompt stream, or ``None`` if no engine has it.

        It is the engine's URL if the router does not know the stream's rank.

        Args:
            headers: the client's API key.

        Raises:
            NoEngine: if no engine answers.
            AllEnginesRefused: if every engine refuses the API key.
        """
        if (place := self._stream_places.get(stream)) is not None:
            engine = self._engines[split_place(place)[0]]
            # After a restart it may have fewer data-parallel ranks.
            if engine.is_up and place in engine.places:
                return place
            self.forget_stream(stream)
        if not (stream.isascii() and stream.isalnum()):
            return None
        replies = await self.ask_all(
            "GET",
            f"{STREAMS}/{stream}",
            headers,
            seconds=_LOOKUP_SECONDS,
            enough=lambda reply: reply.status_code in (200, _GONE),
        )
        for engine, reply in replies.items():
            if reply.status_code in (200, _GONE):
                self.remember_stream(stream, engine)
                return engine
        refusals = [reply for reply in replies.values() if reply.status_code in (401, 403)]
        if len(refusals) == len(replies):
            raise AllEnginesRefused(refusals[0])
        return None

    async def count_streams(self, headers: Mapping[str, str]) -> int:
        """Return the number of open prompt streams. Raises: the errors of :meth:`get_objects`."""
        counts = [state.get("open") for state in await self.get_objects(STREAMS, headers)]
        return sum(count for count in counts if isinstance(count, int))

    async def get_objects(self, target: str, headers: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the JSON objects at a path from those engines that answer with 200.

        Engines without the plugin, which answer 404, have empty ones.

        Raises:
            NoEngine: if no engine answers.
            AllEnginesRefused: if no engine answers with 200.
        """
        replies = list((await self.ask_all("GET", target, headers)).values())
        if not any(reply.status_code == 200 for reply in replies):
            raise AllEnginesRefused(replies[0])
        return [
            parse_object(reply.body) if reply.status_code == 200 else {}
            for reply in replies
            if reply.status_code in (200, 404)
        ]

    async def ask_all(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        *,
        seconds: float = _TIMEOUT_SECONDS,
        enough: Callable[[Response], bool] = lambda _: False,
    ) -> dict[str, Response]:
        """Send a request to all engines that are up. Return the replies by engine.

        Args:
            seconds: how long to wait for each.
            enough: returns whether a reply is all that is wanted, so that no other is waited for.

        Raises: NoEngine if no engine replies.
        """
        replies: dict[str, Response] = {}

        async def ask(engine: str) -> None:
            try:
                with anyio.move_on_after(seconds):
                    # Reading a state and emptying a cache can both be repeated.
                    answer, content = await self._connections.exchange(
                        method, engine + target, headers, b"", RetryRule.ALWAYS
                    )
                    answer.close()
                    media_type = answer.content_type
                    replies[engine] = Response(content, answer.status, media_type=media_type)
                    if enough(replies[engine]):
                        group.cancel_scope.cancel()
            except EngineLost:
                return

        async with anyio.create_task_group() as group:
            for engine in self.urls_up():
                group.start_soon(ask, engine)
        if not replies:
            raise NoEngine
        return replies


def merge_info(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge engines' ``/flashmoa/info`` into that of one engine with the abilities they share.

    Args: infos: an engine without the plugin has an empty one, and no abilities.
    """
    capabilities = set(infos[0].get("capabilities", []))
    capabilities.intersection_update(*(info.get("capabilities", []) for info in infos))
    limits = {
        name: min(info[name] for info in infos if info.get(name) is not None)
        for name in ("context_length", "max_prompt_tokens")
        if any(info.get(name) is not None for info in infos)
    }
    return {
        **max(infos, key=len),
        **limits,
        "data_parallel_ranks": 1,  # The router chooses among them itself.
        "capabilities": sorted(capabilities),
        "prompt_streams": sum(info.get("prompt_streams", 0) for info in infos),
        "kv": [rank for info in infos for rank in info.get("kv", [])],
    }
