"""Find the engines behind a front end of NVIDIA Dynamo, and place prompt streams on them.

Clients know only the front end's address. The front end does not forward prompt streams, so the
client opens a stream on a worker itself. It asks the front end which worker the stream's request
would go to now; the front end decides by load, session and reported KV, as it does for requests.
The request itself goes through the front end, which follows the KV that the stream has computed.
The worker recognises the request by its prompt. On another worker, it is an ordinary request.
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
from pydantic import AliasPath, BaseModel, Field

from flashmoa import errors
from flashmoa.engine.plain import Models
from flashmoa.engine.soon import RETRY_SECONDS, SOON_SECONDS
from flashmoa.engine.wire import EngineInfo

logger = logging.getLogger(__name__)

# A list of workers is used for this time.
_LIST_LIFETIME_SECONDS = 2.0
# A server that is no front end is asked again after this time.
_OTHER_SERVER_SECONDS = 60.0
_INFERENCE_ENGINES = {"sglang", "vllm"}  # Engines name themselves as the owners of their models.
# This annotation makes Dynamo answer where it would send a request, without sending it.
_ASK_ONLY = {"annotations": ["query_instance_id:"], "extra_fields": ["worker_id"]}
_MAY_BE_STARTING = (errors.EngineUnreachable, errors.EngineTimeout, errors.EngineDraining)
# The id of a stream behind a front end is the engine's URL, this separator, and the engine's id.
_SEPARATOR = " "


def is_behind(stream_id: str) -> bool:
    """Return whether a stream is behind a front end. Requests cannot name such a stream."""
    return "://" in stream_id


class Engine(Protocol):
    """The part of ``EngineClient`` that a front end needs."""

    url: str

    async def info(self) -> EngineInfo:
        """Return the engine's capabilities."""
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


class _Placed(BaseModel):
    worker: _WorkerId = Field(validation_alias=AliasPath("nvext", "worker_id"))


class _LeftOut(NamedTuple):
    """A listed worker that is not used until some time.

    ``is_dropped``: it could not be reached. Otherwise it has no prompt streams.
    """

    until: float
    is_dropped: bool


class FrontEnd(Generic[E]):
    """The engines behind a server, if the server is a front end of Dynamo.

    A front end lists the ports of its workers' request planes. ``flashmoa serve --dynamo`` gives
    the HTTP server the preceding port.

    Args:
        ask: sends a request to the front end: ``ask(method, path, answer_type, body)``.
        connect: makes a client of an engine, given its URL.
    """

    def __init__(self, ask: Callable[..., Awaitable[Any]], connect: Callable[[str], E]) -> None:
        self._ask = ask
        self._connect = connect
        self._clients: dict[str, E] = {}
        self._gone: list[E] = []
        # The workers' URLs by Dynamo's ids. They are used until `_fresh_until`.
        self._workers: dict[int, str] = {}
        self._fresh_until = 0.0
        self._left_out: dict[int, _LeftOut] = {}
        # Whether the front end may find workers soon; until when vanished workers may return.
        self._is_starting = False
        self._expected_until = 0.0
        # One per event loop: callers wait while another one asks for the workers.
        self._locks = WeakKeyDictionary[asyncio.AbstractEventLoop, anyio.Lock]()

    @property
    def is_known(self) -> bool:
        """Whether the last answer listed engines."""
        return bool(self._workers)

    @property
    def expects_workers(self) -> bool:
        """Whether there are engines, were some lately, or may be some soon."""
        return self.is_known or self._is_starting or time.monotonic() < self._expected_until

    def global_id(self, engine: E, stream_id: str) -> str:
        """Return the id, for clients of the front end, of an engine's stream."""
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
        """Return an engine to render prompts, which all do alike; ``None`` if there is none."""
        workers = await self._find()
        return self._engine(min(workers.values())) if workers else None

    async def workers(self) -> list[E]:
        """Return the engines that take requests now."""
        return [self._engine(url) for url in (await self._find()).values()]

    async def place(self, prompt: str, model: str) -> E | None:
        """Return the engine that would now get the request whose prompt begins so.

        Raises: EngineError if the front end does not tell.
        """
        workers = await self._find()
        if not workers:
            return None
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "nvext": _ASK_ONLY}
        placed: _Placed = await self._ask("POST", "/v1/completions", _Placed, body)
        # With separate prefill workers, the prefill worker computes the prompt's KV.
        chosen = placed.worker.prefill_worker_id
        if chosen is None:
            chosen = placed.worker.decode_worker_id
        if chosen in self._left_out and self._left_out[chosen].is_dropped:
            # The request will go to the worker that has its KV, wherever the stream is opened.
            return self._engine(choice([*workers.values()]))
        if chosen not in workers:
            self._fresh_until = 0.0
            raise errors.EngineUnreachable(
                f"the front end would send the request to worker {chosen}, which has no prompt "
                "streams; start workers with `flashmoa serve --dynamo`"
            )
        return self._engine(workers[chosen])

    async def lists(self, global_id: str) -> bool:
        """Return whether a stream's worker gets requests. A draining worker has left the list."""
        return global_id.partition(_SEPARATOR)[0] in (await self._find()).values()

    def drop(self, engine: E) -> bool:
        """Stop using a listed worker that cannot be reached, for some time.

        Return whether other workers are left.
        """
        dropped = [id_ for id_, url in self._workers.items() if url == engine.url]
        left_out = _LeftOut(time.monotonic() + RETRY_SECONDS, is_dropped=True)
        self._left_out |= dict.fromkeys(dropped, left_out)
        self._workers = {id_: self._workers[id_] for id_ in self._workers.keys() - dropped}
        return self.is_known

    async def close(self) -> None:
        """Close the connections to the engines."""
        # A copy: links that end meanwhile may connect to another engine.
        for client in [*self._clients.values(), *self._gone]:
            await client.close()

    async def _find(self) -> dict[int, str]:
        """Return the URLs of the workers with the plugin, by Dynamo's ids."""
        loop = asyncio.get_running_loop()
        async with self._locks.setdefault(loop, anyio.Lock()):
            if time.monotonic() >= self._fresh_until:
                self._workers = await self._look()
                if self._workers:
                    # Workers that restart return within two minutes.
                    self._expected_until = time.monotonic() + 120.0
                self._fresh_until = time.monotonic() + self._seconds_fresh()
        return self._workers

    def _seconds_fresh(self) -> float:
        """Return the lifetime of the current list of workers."""
        if self.is_known or time.monotonic() < self._expected_until:
            return _LIST_LIFETIME_SECONDS
        if self._left_out:
            return RETRY_SECONDS
        return 0.0 if self._is_starting else _OTHER_SERVER_SECONDS

    async def _look(self) -> dict[int, str]:
        listed = await self._list()
        found = {id_: url for id_, url in listed.items() if self._workers.get(id_) == url}
        now = time.monotonic()
        left_out = {id_: each for id_, each in self._left_out.items() if each.until > now}
        self._left_out = {id_: left_out[id_] for id_ in left_out.keys() & listed.keys()}
        async with anyio.create_task_group() as group:
            for id_ in listed.keys() - found.keys() - self._left_out.keys():
                group.start_soon(self._add, found, id_, listed[id_])
        # Links may still be sending to workers that have gone, so the next look closes them.
        # Another event loop may look, too, so each client is popped once.
        gone = [self._clients.pop(url, None) for url in self._clients.keys() - found.values()]
        closing, self._gone = self._gone, [client for client in gone if client is not None]
        for client in closing:
            await client.close()
        return found

    async def _list(self) -> dict[int, str]:
        """Return the URLs of the workers that answer requests; none for another server."""
        listed: dict[int, str] = {}
        is_starting = False
        try:
            models: Models = await self._ask("GET", "/v1/models", Models, None)
            # An engine is not asked for its health: SGLang would decode a token to answer.
            if not models.owners & _INFERENCE_ENGINES:
                health: _Health = await self._ask("GET", "/health", _Health, None)
                urls = ((each.instance_id, _http_url(each)) for each in health.instances)
                listed = {id_: url for id_, url in urls if url is not None}
                # A front end answers before it has found its workers.
                is_starting = not listed
        except errors.PluginMissing:  # The server is of another kind.
            pass
        except errors.EngineError as error:
            listed = self._workers  # The front end may be restarting.
            is_starting = isinstance(error, _MAY_BE_STARTING)
        self._is_starting = is_starting
        return listed

    async def _add(self, found: dict[int, str], id_: int, url: str) -> None:
        """Add a worker if it has the plugin."""
        try:
            # Rendering a prompt includes this question, and may take `SOON_SECONDS` in all.
            with anyio.fail_after(SOON_SECONDS / 2):
                info = await self._engine(url).info()
            if "prompt_streams" in info.capabilities:
                found[id_] = url
                return
        except (errors.EngineError, TimeoutError) as error:
            logger.debug("Worker %s of a front end has no prompt streams: %s", url, error)
        self._left_out[id_] = _LeftOut(time.monotonic() + RETRY_SECONDS, is_dropped=False)


def _http_url(instance: _Instance) -> str | None:
    """Return the URL of a worker's engine; ``None`` for an instance that answers no requests."""
    address = str(instance.transport.get("tcp", "")).partition("/")[0]
    host, _, port = address.rpartition(":")
    if instance.endpoint != "generate" or not host or not port.isdecimal():
        return None
    return f"http://{host}:{int(port) - 1}"
