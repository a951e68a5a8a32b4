"""Call an engine's HTTP API (:class:`EngineClient`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    suppress,
)
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Self, TypeVar

import httpx

from flashmoa import errors
from flashmoa.engine import wire
from flashmoa.engine.connections import engine_url, make_http_client
from flashmoa.engine.front_end import FrontEnd, is_behind
from flashmoa.engine.generation import (
    is_event_stream,
    read_chat,
    read_events,
    read_generation,
    read_lines,
)
from flashmoa.engine.plain import PlainServer
from flashmoa.engine.refusals import Answer, bad_answer, make_refusal, read_answer, translate_errors
from flashmoa.engine.settings import EngineSettings
from flashmoa.engine.soon import SoonAnswers
from flashmoa.engine.wire import (
    Delta,
    EngineInfo,
    Prefilled,
    StreamState,
    kv_namespace,
    prompt_fields,
)

Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")
# Converts the events of a streamed answer.
ReadDeltas = Callable[[AsyncGenerator[dict[str, Any]]], AsyncGenerator[Delta]]

# Additional headers for the requests sent in this context. A client's own headers come first.
request_headers: ContextVar[Mapping[str, str]] = ContextVar(
    "flashmoa_headers", default=MappingProxyType({})
)


class EngineClient:
    """Calls an SGLang server, with the plugin or without, or another OpenAI server.

    If the server is a front end of Dynamo, the engines behind it render prompts and open prompt
    streams (:class:`FrontEnd`). The id of such a stream names its engine; requests do not name it.

    Args:
        base_url: ``http://HOST:PORT``, with or without ``/v1``.
        api_key: the server's ``--api-key``, if it has one.
        timeout: seconds to wait for an answer, and for the next piece of a streamed one.
        headers: headers to send with every request.
        namespace: the KV namespace of the client's prompt streams and chats; see
            :func:`kv_namespace`.
        model: the served model's name, for servers that require it, or ``base:adapter``.
        engine_settings: says how links use the server.

    Every method raises :class:`EngineUnreachable`, :class:`EngineTimeout` and
    :class:`BadAnswer`. Methods that use the plugin's routes also raise :class:`PluginMissing` and
    :class:`RequestRefused` (see ``flashmoa.errors``). Close the client, or use it as a context
    manager. It works in any number of event loops, with separate connections in each.
    """

    def __init__(  # noqa: PLR0913 - all but the URL have a default
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout = 600.0,
        headers: Mapping[str, str] | None = None,
        namespace: Mapping[str, str] | None = None,
        model: str | None = None,
        engine_settings: EngineSettings | None = None,
    ) -> None:
        self.url = engine_url(base_url)
        self.model = model or "default"
        self.namespace = kv_namespace({"model": self.model, **(namespace or {})})
        self.settings = engine_settings or EngineSettings()
        self._renders_responses = True
        # How links prefill if the server does not have the plugin.
        self.plain = PlainServer(self.ask, model)
        self._info: EngineInfo | None = None  # The engine's first answer.
        self._accepts_options = True  # Whether it has refused no option of streams.
        self._answering_soon = SoonAnswers(self.url)
        # The context length of each model, once the server has listed its models.
        self._context_lengths: dict[str, int | None] = {}
        # Agents prefer their other engines until this time of the monotonic clock, because this
        # engine did not answer; `None` if it did.
        self.avoided_until: float | None = None
        self._http = make_http_client(self.url, api_key, timeout, headers)

        def connect(url: str) -> EngineClient:
            # Never send over plain HTTP a secret that TLS protected on the way to the front end.
            trusts = self.url.startswith("http:") or url.startswith("https:")
            return EngineClient(
                url,
                api_key=api_key if trusts else None,
                timeout=timeout,
                headers=headers if trusts else None,
                namespace=self.namespace,
                model=model,
                engine_settings=self.settings,
            )

        self._front_end = FrontEnd(self.ask, connect)

    @property
    def authorization(self) -> str | None:
        """The ``Authorization`` header of its requests; ``None`` if there is none."""
        return self._http.headers.get("authorization")

    @property
    def is_front_end(self) -> bool:
        """Whether the server is a front end with engines, had some lately, or is starting."""
        return self._front_end.expects_workers

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self.url}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        await self._front_end.close()
        await self._http.aclose()

    async def info(self) -> EngineInfo:
        """Return the engine's model, capabilities and state."""
        return await self.ask("GET", "/flashmoa/info", EngineInfo)

    async def context_length(self, model: str) -> int | None:
        """Return a model's context length in tokens, ``None`` if the server does not report it.

        The client asks the server until the server lists its models. For a model that is not
        listed, return the first model's length: SGLang answers any name with its one model.
        """
        if not self._context_lengths:
            self._context_lengths = await self.plain.models()
        first = next(iter(self._context_lengths.values()), None)
        return self._context_lengths.get(model, first)

    async def follows_calls(self) -> bool:
        """Return whether the engine itself adds the text of its calls to streams.

        The client asks until the engine answers; see :meth:`follow_call`. Engines behind a front
        end do not: the call and the stream may be on different engines.
        """
        try:
            capabilities = (await self._first_info()).capabilities
        except errors.EngineError:
            return False
        return "follow" in capabilities and not self.is_front_end

    async def kv_pool_tokens(self) -> int:
        """Return the size of the engine's KV pool. It is asked for once, as :meth:`render` asks."""
        return sum(rank.total for rank in (await self._first_info()).kv)

    async def _first_info(self) -> EngineInfo:
        if self._info is None:
            self._info = await self._ask_any(lambda engine: engine.info())
        return self._info

    async def render(self, messages: Messages, **fields: Any) -> str:
        """Return the prompt of ``messages`` as the engine's chat template renders it.

        Without the plugin, see :meth:`PlainServer.render`.

        Args:
            fields: the request's other fields, as :func:`prompt_fields` returns them.

        Raises: EngineTimeout if the engine, and each one behind a front end, does not answer within
            2 s, whatever the client's timeout. An engine that answered no request in that time is
            then left alone for 10 s.
        """
        fields = prompt_fields(fields)
        try:
            return await self._render("/render", {"messages": list(messages), **fields})
        except errors.PluginMissing:
            if self.settings.without_plugin == "off":
                raise
            async with self._answering_soon.limit():
                return await self.plain.render(messages, fields)

    async def render_response(self, body: Mapping[str, Any]) -> str:
        """Return the prompt that the engine renders for a request of the Responses API.

        Raises: MalformedRequest without the plugin; the client notices that once. See
            :meth:`render`.
        """
        try:
            if self._renders_responses:
                return await self._render("/render_response", body)
        except errors.PluginMissing:
            self._renders_responses = False
        text = "only engines with the plugin render requests of the Responses API"
        raise errors.MalformedRequest(text, 400, "malformed")

    async def _render(self, path: str, body: Mapping[str, Any]) -> str:
        def ask(engine: EngineClient) -> Awaitable[wire.RenderedText]:
            return engine.ask("POST", path, wire.RenderedText, body)

        return (await self._ask_any(ask)).text

    async def prefill_only(
        self,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
        add_special_tokens: bool | None = None,
        cache_salt: str | None = None,
    ) -> Prefilled:
        """Compute a prompt's KV and leave it in the engine's radix cache.

        ``add_special_tokens`` is as for :meth:`open_stream`.
        """
        body = {
            "text": text,
            "input_ids": input_ids,
            "messages": messages,
            "add_special_tokens": add_special_tokens,
            "cache_salt": cache_salt,
        }
        return await self.ask("POST", "/prefill_only", Prefilled, body)

    async def open_stream(
        self,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        add_special_tokens: bool | None = None,
        ttl_seconds: float | None = None,
        expected_output_tokens: int | None = None,
        namespace: Mapping[str, str] | None = None,
    ) -> StreamState:
        """Open a prompt stream with its first piece.

        Args:
            add_special_tokens: ``False`` for text from a chat template, which contains them.
            namespace: the stream's KV namespace; by default the client's.
        """
        body = {
            "text": text,
            "input_ids": input_ids,
            "add_special_tokens": add_special_tokens,
            "ttl_seconds": ttl_seconds,
            "expected_output_tokens": expected_output_tokens,
            **(self.namespace if namespace is None else namespace),
        }

        def ask(engine: EngineClient) -> Awaitable[StreamState]:
            return engine.ask("POST", "/prompt_streams", StreamState, body)

        async def place() -> EngineClient | None:
            return await self._front_end.place(text or "", await self.plain.model())

        engine, state = await self._ask_engine(ask, place)
        if engine is self:
            return state
        return _renamed(state, self._front_end.global_id(engine, state.id))

    async def append(
        self,
        stream_id: str,
        seq: int,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        start: int | None = None,
        end: bool = False,
    ) -> StreamState:
        """Append piece number ``seq``, counted from 0. A repeated piece changes nothing.

        Args:
            start: the character offset where ``text`` begins and replaces the rest of the stream;
                by default the stream's end.
        """
        body = {"seq": seq, "text": text, "input_ids": input_ids, "start": start, "end": end}
        return await self._ask_stream("POST", stream_id, "/append", body)

    async def follow_call(self, stream_id: str, seq: int, call_id: str) -> StreamState:
        """Let the engine append the text of its own call while it writes the text.

        This counts as piece number ``seq``, and the next piece must have a ``start``. For the ids
        of calls see :mod:`flashmoa.link.hearing`.
        """
        body = {"seq": seq, "call": call_id}
        return await self._ask_stream("POST", stream_id, "/append", body)

    async def takes_requests(self, stream_id: str) -> bool:
        """Return whether a stream's engine still gets requests. A draining engine does not.

        Only a front end tells that; other engines count as getting requests.
        """
        return not is_behind(stream_id) or await self._front_end.lists(stream_id)

    async def keep_alive(self, stream_id: str) -> StreamState:
        """Restart the ``ttl_seconds`` of a prompt stream, as an append does."""
        return await self._ask_stream("POST", stream_id, "/keep_alive")

    async def stream_state(self, stream_id: str) -> StreamState:
        """Return the state of a prompt stream."""
        return await self._ask_stream("GET", stream_id)

    async def delete_stream(self, stream_id: str) -> wire.StreamFigures | None:
        """End a prompt stream, if it has not ended already.

        Return how a request used the stream if the request did not name it.
        """
        engine, own_id = self._find_stream(stream_id)
        with suppress(errors.StreamGone, errors.StreamUnknown):
            path = f"/prompt_streams/{own_id}"
            return (await engine.ask("DELETE", path, wire.DeletedStream)).usage
        return None

    async def _ask_any(self, ask: Callable[[EngineClient], Awaitable[T]]) -> T:
        """Ask this server, or any engine behind it, for an answer that is useless later.

        Raises: EngineTimeout if none answers soon; see :class:`SoonAnswers`.
        """

        async def ask_soon(engine: EngineClient) -> T:
            async with engine._answering_soon.limit():
                return await ask(engine)

        async def any_engine() -> EngineClient | None:
            # This server is asked for its workers.
            async with self._answering_soon.limit():
                return await self._front_end.any_engine()

        return (await self._ask_engine(ask_soon, any_engine))[1]

    async def _ask_engine(
        self,
        ask: Callable[[EngineClient], Awaitable[T]],
        place: Callable[[], Awaitable[EngineClient | None]],
    ) -> tuple[EngineClient, T]:
        """Ask this server or, if it lacks the plugin, an engine behind it.

        ``place`` finds the engine; another one is asked if it is slow or cannot be reached. Return
        the client that got the answer, and the answer.
        """
        engine = await place() if self._front_end.is_known else None
        try:
            return engine or self, await ask(engine or self)
        except errors.PluginMissing:
            if engine is not None:
                raise
            if await place() is None:
                if not self._front_end.expects_workers:
                    raise
                raise errors.EngineUnreachable(
                    f"no worker with prompt streams behind {self.url} can be reached now"
                ) from None
        except (errors.EngineUnreachable, errors.EngineTimeout):
            if engine is None or not self._front_end.drop(engine):
                raise
        return await self._ask_engine(ask, place)

    def _find_stream(self, stream_id: str) -> tuple[EngineClient, str]:
        if is_behind(stream_id):
            return self._front_end.find_stream(stream_id)
        return self, stream_id

    async def _ask_stream(
        self, method: str, stream_id: str, path: str = "", body: Mapping[str, Any] | None = None
    ) -> StreamState:
        engine, own_id = self._find_stream(stream_id)
        state = await engine.ask(method, f"/prompt_streams/{own_id}{path}", StreamState, body)
        return _renamed(state, stream_id)

    async def flush_cache(self, wait_seconds: float = 30.0) -> None:
        """Empty the radix cache once the engine is idle.

        Raises: RequestRefused if requests are still running after ``wait_seconds``.
        """
        try:
            async with self._open("POST", f"/flush_cache?timeout={wait_seconds}") as response:
                with translate_errors(self.url):
                    await response.aread()  # The next request can use the connection.
        except errors.MalformedRequest as error:
            # SGLang answers 400 to a flush that comes too early.
            raise errors.RequestRefused(
                f"{self.url} was not idle for {wait_seconds:g} s, so that its cache was not "
                f"emptied ({error}). Try again once its requests have ended.",
                error.status,
                error.code,
            ) from error

    def generate(
        self,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        sampling: Mapping[str, Any] | None = None,
        prompt_stream_id: str | None = None,
        expected_output_tokens: int | None = None,
    ) -> AbstractAsyncContextManager[AsyncGenerator[Delta]]:
        """Stream a generation (``/generate``). Leaving the context aborts it.

        ``sampling`` are SGLang's sampling parameters. Some engines schedule by
        ``expected_output_tokens``.
        """
        body = {
            "text": text,
            "input_ids": input_ids,
            "sampling_params": dict(sampling or {}),
            "prompt_stream_id": prompt_stream_id,
            "expected_output_tokens": expected_output_tokens,
            "stream": True,
        }
        return self._stream("/generate", body, read_generation)

    @asynccontextmanager
    async def chat(
        self,
        messages: Messages,
        *,
        prompt_stream_id: str | None = None,
        stream_options: Mapping[str, Any] = MappingProxyType({}),
        **parameters: Any,
    ) -> AsyncGenerator[AsyncGenerator[Delta]]:
        """Stream a chat completion. Leaving the context aborts it.

        Args:
            stream_options: with ``continuous_usage_stats`` every step has the usage so far, if the
                server counts while it writes. A server that refuses this is asked without.
            parameters: parameters of OpenAI's chat completions and of SGLang.
        """
        body = {
            "model": self.model,
            **self.namespace,
            **parameters,
            "messages": list(messages),
            "prompt_stream_id": prompt_stream_id,
            "stream": True,
        }
        async with AsyncExitStack() as stack:
            options = {**stream_options} if self._accepts_options else {}
            while True:
                body["stream_options"] = {"include_usage": True, **options}
                try:
                    asked = self._stream("/v1/chat/completions", body, read_chat)
                    deltas = await stack.enter_async_context(asked)
                    break
                except errors.RequestRefused as error:
                    if not options or not any(option in str(error) for option in options):
                        raise
                    self._accepts_options, options = False, {}
            yield deltas

    async def workers(self) -> list[EngineClient]:
        """Return clients of the engines behind a front end; an empty list for other servers."""
        try:
            return await self._front_end.workers()
        except errors.EngineError:
            return []

    @asynccontextmanager
    async def hear(self, channel: str) -> AsyncGenerator[AsyncGenerator[dict[str, Any]]]:
        """Yield the lines of a channel of calls as they arrive; see docs/engine-api.md.

        ``channel`` is the channel's id, 16 hexadecimal digits.

        Raises: EngineError if the engine refuses the channel, or breaks it off.
        """
        path, headers = "/flashmoa/calls", {wire.CHANNEL_HEADER: channel}
        # An engine sends a line every 5 s at least, if only an empty one.
        opened = self._open("GET", path, headers=headers, timeout=15.0)
        async with opened as response:
            lines = self._translated(response, read_lines(response))
            async with aclosing(lines):
                yield lines

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text."""
        body = {"prompt": list(texts)}
        return (await self.ask("POST", "/tokenize", wire.TextsTokens, body)).tokens

    async def tokenize_chat(self, messages: Messages, **fields: Any) -> list[int]:
        """Return the token ids of the prompt that :meth:`render` returns as text."""
        body = {"messages": list(messages), **prompt_fields(fields)}
        return (await self.ask("POST", "/tokenize", wire.PromptTokens, body)).tokens

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, including special ones."""
        body = {"tokens": list(token_ids), "skip_special_tokens": False}
        return (await self.ask("POST", "/detokenize", wire.RenderedText, body)).text

    async def similarities(
        self, texts: Sequence[str], *, model: str = "default"
    ) -> list[list[float]]:
        """Return how similar each text's token states are to each text's, in [0, 1].

        The measure is the Frobenius cosine similarity (Faster-MoA, Algorithm 1). The engine must
        serve an embedding model with the plugin (``flashmoa serve --is-embedding``).

        Raises: PluginMissing if it does not.
        """
        body = {"model": model, "texts": list(texts)}
        answer = await self.ask("POST", "/flashmoa/similarities", wire.Similarities, body)
        return answer.similarities

    async def ask(
        self, method: str, path: str, answer: type[Answer], body: Mapping[str, Any] | None = None
    ) -> Answer:
        """Send a request to any route, and return its answer as a value of the type ``answer``.

        Fields of the body that are ``None`` are not sent.

        Raises: EngineError if no answer comes, or an error, or an answer of another form.
        """
        json = None if body is None else _without_none(body)
        with translate_errors(self.url):
            headers = self._additional_headers()
            response = await self._http.request(method, path, json=json, headers=headers)
        return read_answer(response, self.url, answer)

    def _additional_headers(self) -> dict[str, str]:
        headers, own = request_headers.get(), self._http.headers
        return {name: headers[name] for name in headers if name not in own}

    @asynccontextmanager
    async def _stream(
        self, path: str, body: Mapping[str, Any], read: ReadDeltas
    ) -> AsyncGenerator[AsyncGenerator[Delta]]:
        """Send a request and yield the deltas of its answer. Leaving the context aborts it.

        Raises: EngineError if no answer comes, or an error, or no stream of events.
        """
        async with self._open("POST", path, json=_without_none(body)) as response:
            if not is_event_stream(response):
                raise bad_answer(self.url, path)
            async with (
                aclosing(read_events(response)) as events,
                aclosing(self._translated(response, read(events))) as deltas,
            ):
                yield deltas

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> AsyncGenerator[httpx.Response]:
        """Send a request, and yield its answer before the body is read.

        Raises: EngineError if no answer comes, or an error.
        """
        async with AsyncExitStack() as stack:
            # Exceptions from the block of the context are not the engine's, so they stay outside.
            with translate_errors(self.url):
                response = await stack.enter_async_context(
                    self._http.stream(
                        method, path, headers={**self._additional_headers(), **headers}, **options
                    )
                )
                if response.is_error:
                    await response.aread()
                    raise make_refusal(response, self.url)
            yield response

    async def _translated(
        self, response: httpx.Response, items: AsyncGenerator[T]
    ) -> AsyncGenerator[T]:
        """Yield the items of an answer. If reading one fails, raise an EngineError instead."""
        try:
            with translate_errors(self.url):
                async with aclosing(items):
                    async for item in items:
                        yield item
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise bad_answer(self.url, response.request.url.path) from error


def _renamed(state: StreamState, stream_id: str) -> StreamState:
    return state.model_copy(update={"id": stream_id})


def _without_none(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}
