"""Find the engines behind a front end of NVIDIA Dynamo, and place prompt streams on them.

Clients are given the front end's address alone. It passes no prompt streams on, so these are opened
on the worker to which it would send the stream's request: it is asked, and decides as it does for
requests, by load, by session and by the KV that workers have reported. The request itself goes
through the front end as any other, follows the KV that its stream has computed, and is known to the
worker by its prompt. If it goes to another worker after all, it is an ordinary request there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from random import choice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import anyio
from pydantic import BaseModel

from flashmoa import errors
from flashmoa.engine.plain import Models
from flashmoa.engine.wire import EngineInfo

logger = logging.getLogger(__name__)

# For how long a list of workers is used, in seconds, and for how long a server is not asked again
# that is no front end.
_FRESH_SECONDS = 2.0
_NONE_SECONDS = 60.0
# For how long after the last worker has gone others are expected, as while it restarts.
_KNOWN_SECONDS = 120.0
# Whose models an engine says that it serves.
_ENGINES = {"sglang", "vllm"}
# How long a worker has to say what it can do: all of a prompt's rendering may take 2 s.
_INFO_SECONDS = 1.0
# For how long one that does not say that it has prompt streams is not asked again.
_RETRY_SECONDS = 10.0
# The annotation with which Dynamo says where it would send a request, and sends it nowhere.
_ASK_ONLY = {"annotations": ["query_instance_id:"], "extra_fields": ["worker_id"]}
# Errors of a server that may be starting.
_NOT_YET = (errors.EngineUnreachable, errors.EngineTimeout, errors.EngineDraining)
# Between the engine's URL and the stream's id there, in the id of a stream behind a front end.
_SEPARATOR = " "


def is_behind(stream_id: str) -> bool:
    """Return whether a stream is behind a front end, so that its request cannot name it."""
    return "://" in stream_id


class Engine(Protocol):
    """What is needed of a client of an engine, an ``EngineClient``."""

    url: str

    async def info(self) -> EngineInfo:
        """Return what the engine can do."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...


E = TypeVar("E", bound=Engine)


class _Instance(BaseModel):
    endpoint: str
    instance_id: int
    transport: dict[str, Any]


class _Health(BaseModel):
    instances: list[_Instance]


class _WorkerId(BaseModel):
    prefill_worker_id: int | None = None
    decode_worker_id: int | None = None


class _Extension(BaseModel):
    worker_id: _WorkerId


class _Placed(BaseModel):
    nvext: _Extension


class _LeftOut(NamedTuple):
    """Says until when a worker that is listed is not asked, and whether it had to be dropped."""

    until: float
    is_dropped: bool


class FrontEnd(Generic[E]):
    """The engines behind a server, if that is a front end of Dynamo.

    ``flashmoa serve --dynamo`` puts an engine's HTTP port just before that of its request plane,
    which the front end lists.

    Args:
        ask: sends a request to the front end: ``ask(method, path, answer_type, body)``.
        connect: makes a client of an engine, given its URL.
    """

    def __init__(self, ask: Callable[..., Awaitable[Any]], connect: Callable[[str], E]) -> None:
        self._ask = ask
        self._connect = connect
        self._clients: dict[str, E] = {}
        self._gone: list[E] = []
        # The URLs of the workers by Dynamo's ids, and until when they are not looked for again.
        self._workers: dict[int, str] = {}
        self._fresh_until = 0.0
        self._left_out: dict[int, _LeftOut] = {}
        # Whether it may find workers soon, and until when workers that have gone may return.
        self._is_starting = False
        self._expected_until = 0.0
        # By event loop: others who ask meanwhile wait for the answer.
        self._looking = WeakKeyDictionary[asyncio.AbstractEventLoop, anyio.Lock]()

    @property
    def is_known(self) -> bool:
        """Whether there are such engines, as far as is known."""
        return bool(self._workers)

    @property
    def expects_workers(self) -> bool:
        """Whether there are such engines, were not long ago, or are likely to come."""
        return self.is_known or self._is_starting or time.monotonic() < self._expected_until

    def global_id(self, engine: E, stream_id: str) -> str:
        """Return the id of a stream of one of the engines."""
        return f"{engine.url}{_SEPARATOR}{stream_id}"

    def find_stream(self, global_id: str) -> tuple[E, str]:
        """Return the engine of a stream, and the stream's id there."""
        url, _, stream_id = global_id.partition(_SEPARATOR)
        return self._engine(url), stream_id

    def _engine(self, url: str) -> E:
        if url not in self._clients:
            self._clients[url] = self._connect(url)
        return self._clients[url]

    async def any_engine(self) -> E | None:
        """Return one of the engines, which all render prompts alike; ``None`` if there is none."""
        workers = await self._find()
        return self._engine(min(workers.values())) if workers else None

    async def workers(self) -> list[E]:
        """Return the engines that take requests now."""
        return [self._engine(url) for url in (await self._find()).values()]

    async def place(self, prompt: str, model: str) -> E | None:
        """Return the engine to which the request with this prompt would go now.

        Args:
            prompt: the prompt as far as it is known.
            model: the name of the served model.

        Raises: EngineError if the front end does not say it.
        """
        workers = await self._find()
        if not workers:
            return None
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "nvext": _ASK_ONLY}
        placed: _Placed = await self._ask("POST", "/v1/completions", _Placed, body)
        ids = placed.nvext.worker_id
        # Where prefill and decode are apart, the prompt's KV is made by the first.
        chosen = ids.decode_worker_id if ids.prefill_worker_id is None else ids.prefill_worker_id
        if chosen in self._left_out and self._left_out[chosen].is_dropped:
            # The request will be sent on from there, to where its KV is.
            return self._engine(choice([*workers.values()]))
        if chosen not in workers:
            self._fresh_until = 0.0
            raise errors.EngineUnreachable(
                f"the front end would send the request to worker {chosen}, which has no prompt "
                "streams; start workers with `flashmoa serve --dynamo`"
            )
        return self._engine(workers[chosen])

    async def lists(self, global_id: str) -> bool:
        """Return whether the worker of a stream takes requests; it may have left, to drain."""
        return global_id.partition(_SEPARATOR)[0] in (await self._find()).values()

    def drop(self, engine: E) -> bool:
        """Do not use a worker for some time that the front end lists, but cannot be reached.

        Return whether there are others.
        """
        dropped = [id_ for id_, url in self._workers.items() if url == engine.url]
        left_out = _LeftOut(time.monotonic() + _RETRY_SECONDS, is_dropped=True)
        self._left_out |= dict.fromkeys(dropped, left_out)
        self._workers = {id_: self._workers[id_] for id_ in self._workers.keys() - dropped}
        return self.is_known

    async def close(self) -> None:
        """Close the connections to the engines."""
        # Links that end meanwhile may need another one.
        for client in [*self._clients.values(), *self._gone]:
            await client.close()

    async def _find(self) -> dict[int, str]:
        """Return the engines with the plugin, by the ids of Dynamo's workers."""
        loop = asyncio.get_running_loop()
        async with self._looking.setdefault(loop, anyio.Lock()):
            if time.monotonic() >= self._fresh_until:
                self._workers = await self._look()
                if self._workers:
                    self._expected_until = time.monotonic() + _KNOWN_SECONDS
                self._fresh_until = time.monotonic() + self._seconds_fresh()
        return self._workers

    def _seconds_fresh(self) -> float:
        """Return for how long the list of workers is used, in seconds."""
        if self.is_known or time.monotonic() < self._expected_until:
            return _FRESH_SECONDS
        if self._left_out:
            return _RETRY_SECONDS
        return 0.0 if self._is_starting else _NONE_SECONDS

    async def _look(self) -> dict[int, str]:
        listed = await self._list()
        found = {id_: url for id_, url in listed.items() if self._workers.get(id_) == url}
        now = time.monotonic()
        left_out = {id_: each for id_, each in self._left_out.items() if each.until > now}
        self._left_out = {id_: left_out[id_] for id_ in left_out.keys() & listed.keys()}
        async with anyio.create_task_group() as group:
            for id_ in listed.keys() - found.keys() - self._left_out.keys():
                group.start_soon(self._add, found, id_, listed[id_])
        # Links may be sending to those that have gone, so they are closed the next time. Another
        # event loop may look, too.
        gone = [self._clients.pop(url, None) for url in self._clients.keys() - found.values()]
        closing, self._gone = self._gone, [client for client in gone if client is not None]
        for client in closing:
            await client.close()
        return found

    async def _list(self) -> dict[int, str]:
        """Return the URLs of what answers requests behind the server; none if it is an engine."""
        listed: dict[int, str] = {}
        is_starting = False
        try:
            models: Models = await self._ask("GET", "/v1/models", Models, None)
            # SGLang would decode a token to answer how it is.
            if not models.owners & _ENGINES:
                health: _Health = await self._ask("GET", "/health", _Health, None)
                urls = ((each.instance_id, _http_url(each)) for each in health.instances)
                listed = {id_: url for id_, url in urls if url is not None}
                # A front end answers before it has found its workers.
                is_starting = not listed
        except errors.PluginMissing:  # This is another kind of server.
            pass
        except errors.EngineError as error:
            listed = self._workers  # It may be restarting.
            is_starting = isinstance(error, _NOT_YET)
        self._is_starting = is_starting
        return listed

    async def _add(self, found: dict[int, str], id_: int, url: str) -> None:
        """Add a worker if it has the plugin."""
        try:
            with anyio.fail_after(_INFO_SECONDS):
                info = await self._engine(url).info()
            if "prompt_streams" in info.capabilities:
                found[id_] = url
                return
        except (errors.EngineError, TimeoutError) as error:
            logger.debug("Worker %s of a front end has no prompt streams: %s", url, error)
        self._left_out[id_] = _LeftOut(time.monotonic() + _RETRY_SECONDS, is_dropped=False)


def _http_url(instance: _Instance) -> str | None:
    """Return the URL of a worker's engine; ``None`` of what answers no requests."""
    address = str(instance.transport.get("tcp", "")).partition("/")[0]
    host, _, port = address.rpartition(":")
    if instance.endpoint != "generate" or not host or not port.isdecimal():
        return None
    return f"http://{host}:{int(port) - 1}"
