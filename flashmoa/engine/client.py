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
from flashmoa.engine.refusals import (
    Answer,
    bad_answer,
    make_refusal,
    read_answer,
    translate_errors,
)
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
# Reads the events of an answer.
ReadDeltas = Callable[[AsyncGenerator[dict[str, Any]]], AsyncGenerator[Delta]]

_CHANNEL_HEADER = "X-FlashMoA-Channel"
# An engine sends at least an empty line on a channel every 5 s.
_SILENCE_SECONDS = 15.0


# Further headers of requests that are sent in this context, unless the client has them itself.
request_headers: ContextVar[Mapping[str, str]] = ContextVar(
    "flashmoa_headers", default=MappingProxyType({})
)


class EngineClient:
    """A client of one SGLang server, with the plugin or without, or of another OpenAI server.

    The server may be a front end of Dynamo: prompts are rendered, and prompt streams opened, on the
    engines behind it (:class:`FrontEnd`). Their ids name the engine, and requests do not name them.

    Args:
        base_url: ``http://HOST:PORT``, with or without ``/v1``.
        api_key: the server's ``--api-key``, if it has one.
        timeout: seconds to wait for an answer, and for the next piece of a streamed one.
        headers: headers to send with every request.
        namespace: the namespace of the KV of its prompt streams and chats, as :func:`kv_namespace`
            returns it.
        model: the served model's name, for servers that require it, or ``base:adapter``.
        engine_settings: says how links use the server.

    Every method raises :class:`EngineUnreachable`, :class:`EngineTimeout` and
    :class:`BadAnswer`; those that use the plugin's routes also :class:`PluginMissing` and
    :class:`RequestRefused` (see ``flashmoa.errors``). Close it, or use it as a context manager. It
    can be used in any number of event loops, each of which has connections of its own.
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
        self._info: EngineInfo | None = None  # As the engine said it first.
        self._answering_soon = SoonAnswers(self.url)
        # The context length of each model, once the server has listed its models.
        self._context_lengths: dict[str, int | None] = {}
        # Until when agents ask their other engines first, in seconds of the monotonic clock, since
        # this one did not answer; `None` if it did.
        self.avoided_until: float | None = None
        self._http = make_http_client(self.url, api_key, timeout, headers)

        def connect(url: str) -> EngineClient:
            # What TLS keeps secret is not sent to a server that has none.
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
        """The header with which its requests authenticate; ``None`` if there is none."""
        return self._http.headers.get("authorization")

    @property
    def is_front_end(self) -> bool:
        """Whether there are engines behind it, as far as is known, or were not long ago."""
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

        The server is asked until it lists its models. Of a model that it does not list, it is that
        of the first one: SGLang answers requests for any name with its one model.
        """
        if not self._context_lengths:
            self._context_lengths = await self.plain.models()
        first = next(iter(self._context_lengths.values()), None)
        return self._context_lengths.get(model, first)

    async def follows_calls(self) -> bool:
        """Return whether the engine adds the text of its own calls to streams by itself.

        It is asked until it answers; see :meth:`follow_call`. Engines behind a front end do not: a
        call and a stream may be on two of them.
        """
        try:
            capabilities = (await self._first_info()).capabilities
        except errors.EngineError:
            return False
        return "follow" in capabilities and not self.is_front_end

    async def kv_pool_tokens(self) -> int:
        """Return the size of the engine's KV pool, which is asked for once, as :meth:`render`."""
        return sum(rank.total for rank in (await self._first_info()).kv)

    async def _first_info(self) -> EngineInfo:
        if self._info is None:
            async with self._answering_soon.limit():
                any_engine = self._front_end.any_engine
                _, self._info = await self._ask_engine(lambda engine: engine.info(), any_engine)
        return self._info

    async def render(self, messages: Messages, **fields: Any) -> str:
        """Return the prompt that the engine's chat template makes of ``messages``, as text.

        Without the plugin, see :meth:`PlainServer.render`.

        Args:
            fields: the request's other fields, as :func:`prompt_fields` returns them.

        Raises: EngineTimeout if the engine does not answer within 2 s after it was asked, with any
            timeout of the client; if it answered none, it is not asked again for some seconds.
        """
        fields = prompt_fields(fields)
        async with self._answering_soon.limit():
            try:
                return await self._render("/render", {"messages": list(messages), **fields})
            except errors.PluginMissing:
                if self.settings.without_plugin == "off":
                    raise
                return await self.plain.render(messages, fields)

    async def render_response(self, body: Mapping[str, Any]) -> str:
        """Return the prompt that the engine makes of a request of the Responses API, as text.

        Raises: MalformedRequest without the plugin, which is asked for once; see :meth:`render`.
        """
        async with self._answering_soon.limit():
            try:
                if self._renders_responses:
                    return await self._render("/render_response", body)
            except errors.PluginMissing:
                self._renders_responses = False
        text = "only engines with the plugin render requests of the Responses API"
        raise errors.MalformedRequest(text, 400, "malformed")

    async def _render(self, path: str, body: Mapping[str, Any]) -> str:
        async def ask(engine: EngineClient) -> str:
            return (await engine.ask("POST", path, wire.RenderedText, body)).text

        return (await self._ask_engine(ask, self._front_end.any_engine))[1]

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

        Args:
            add_special_tokens: as for :meth:`open_stream`.
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
            add_special_tokens: ``False`` for text rendered by a chat template, which has them
                already.
            namespace: the namespace of its KV; by default the client's.
        """
        body = {
            "text": text,
            "input_ids": input_ids,
            "add_special_tokens": add_special_tokens,
            "ttl_seconds": ttl_seconds,
            "expected_output_tokens": expected_output_tokens,
            **(self.namespace if namespace is None else namespace),
        }

        async def ask(engine: EngineClient) -> StreamState:
            return await engine.ask("POST", "/prompt_streams", StreamState, body)

        async def place() -> EngineClient | None:
            return await self._front_end.place(text or "", await self.plain.model())

        engine, state = await self._ask_engine(ask, place)
        return (
            state
            if engine is self
            else _renamed(state, self._front_end.global_id(engine, state.id))
        )

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
        """Append piece number ``seq``, counted from 0. Repeating this is harmless.

        Args:
            start: after how many characters of the stream ``text`` comes, in the place of what
                stood there; by default at its end.
        """
        body = {"seq": seq, "text": text, "input_ids": input_ids, "start": start, "end": end}
        return await self._ask_stream("POST", stream_id, "/append", body)

    async def follow_call(self, stream_id: str, seq: int, call_id: str) -> StreamState:
        """Let the engine add the text of one of its calls while it writes that text.

        This counts as piece number ``seq``. The next piece has a ``start``.

        Args: call_id: the id of the call; see :mod:`flashmoa.link.hearing`.
        """
        body = {"seq": seq, "call": call_id}
        return await self._ask_stream("POST", stream_id, "/append", body)

    async def takes_requests(self, stream_id: str) -> bool:
        """Return whether requests come to the engine of a stream; not once it drains, for example.

        That is known of engines behind a front end.
        """
        return not is_behind(stream_id) or await self._front_end.lists(stream_id)

    async def keep_alive(self, stream_id: str) -> StreamState:
        """Extend the life of a prompt stream by its ``ttl_seconds``, as an append does.

        Raises: PluginMissing if the plugin is older than this route.
        """
        return await self._ask_stream("POST", stream_id, "/keep_alive")

    async def stream_state(self, stream_id: str) -> StreamState:
        """Return the state of a prompt stream."""
        return await self._ask_stream("GET", stream_id)

    async def delete_stream(self, stream_id: str) -> wire.StreamFigures | None:
        """End a prompt stream. It is not an error if the stream has ended already.

        Return how a request used it that did not name it.
        """
        engine, own_id = self._find_stream(stream_id)
        with suppress(errors.StreamGone, errors.StreamUnknown):
            path = f"/prompt_streams/{own_id}"
            return (await engine.ask("DELETE", path, wire.DeletedStream)).usage
        return None

    async def _ask_engine(
        self,
        ask: Callable[[EngineClient], Awaitable[T]],
        place: Callable[[], Awaitable[EngineClient | None]],
    ) -> tuple[EngineClient, T]:
        """Ask this server, or if it does not have the plugin, an engine behind it.

        Return also the client of the one that has answered.

        Args: place: finds such an engine, if there is one.
        """
        engine = await place() if self._front_end.is_known else None
        try:
            return engine or self, await ask(engine or self)
        except errors.PluginMissing:
            if engine is not None:
                raise
            if (engine := await place()) is None:
                if not self._front_end.expects_workers:
                    raise
                raise errors.EngineUnreachable(
                    f"no worker with prompt streams behind {self.url} can be reached now"
                ) from None
        except errors.EngineUnreachable:
            if engine is None or not self._front_end.drop(engine):
                raise
            return await self._ask_engine(ask, place)
        return engine, await ask(engine)

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
        response = await self._send("POST", f"/flush_cache?timeout={wait_seconds}")
        if response.is_error:
            error = make_refusal(response, self.url)
            if not isinstance(error, errors.MalformedRequest):
                raise error
            # SGLang refuses with the status of a wrong request what comes too early.
            raise errors.RequestRefused(
                f"{self.url} was not idle for {wait_seconds:g} s, so that its cache was not "
                f"emptied ({error}). Try again once its requests have ended.",
                error.status,
                error.code,
            )

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

        Args:
            sampling: SGLang's sampling parameters.
            expected_output_tokens: number of output tokens, for engines that schedule by it.
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

    def chat(
        self, messages: Messages, *, prompt_stream_id: str | None = None, **parameters: Any
    ) -> AbstractAsyncContextManager[AsyncGenerator[Delta]]:
        """Stream a chat completion. Leaving the context aborts it.

        Args:
            parameters: parameters of OpenAI's chat completions, and SGLang's own.
        """
        body = {
            "model": self.model,
            **self.namespace,
            **parameters,
            "messages": list(messages),
            "prompt_stream_id": prompt_stream_id,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return self._stream("/v1/chat/completions", body, read_chat)

    async def workers(self) -> list[EngineClient]:
        """Return clients of the engines behind a front end; none if it is none, or has none."""
        try:
            return await self._front_end.workers()
        except errors.EngineError:
            return []

    @asynccontextmanager
    async def hear(self, channel: str) -> AsyncGenerator[AsyncGenerator[dict[str, Any]]]:
        """Hear the calls of a channel; see :class:`~flashmoa.link.hearing.CallChannel`.

        Args:
            channel: the channel's id, 16 hexadecimal digits.

        Yields: the channel's lines as they arrive; docs/engine-api.md describes them.

        Raises: EngineError if the engine refuses the channel, or breaks it off.
        """
        path, headers = "/flashmoa/calls", {_CHANNEL_HEADER: channel}
        async with AsyncExitStack() as stack:
            response = await self._begin_answer(
                stack, "GET", path, headers=headers, timeout=_SILENCE_SECONDS
            )
            yield await stack.enter_async_context(aclosing(self._read_lines(response)))

    async def _read_lines(self, response: httpx.Response) -> AsyncGenerator[dict[str, Any]]:
        try:
            with translate_errors(self.url):
                async with aclosing(read_lines(response)) as lines:
                    async for line in lines:
                        yield line
        except ValueError as error:
            raise bad_answer(self.url, response.request.url.path) from error

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, by the engine's tokenizer."""
        body = {"prompt": list(texts)}
        return (await self.ask("POST", "/tokenize", wire.TextsTokens, body)).tokens

    async def tokenize_chat(self, messages: Messages, **fields: Any) -> list[int]:
        """Return the tokens of the prompt that :meth:`render` returns as text."""
        body = {"messages": list(messages), **prompt_fields(fields)}
        return (await self.ask("POST", "/tokenize", wire.PromptTokens, body)).tokens

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, including special ones."""
        body = {"tokens": list(token_ids), "skip_special_tokens": False}
        return (await self.ask("POST", "/detokenize", wire.RenderedText, body)).text

    async def embed(self, texts: Sequence[str], *, model: str = "default") -> list[list[float]]:
        """Return a vector for each text; the engine must serve an embedding model."""
        body = {"model": model, "input": list(texts)}
        answer = await self.ask("POST", "/v1/embeddings", wire.Embeddings, body)
        return answer.in_order()

    async def ask(
        self, method: str, path: str, answer: type[Answer], body: Mapping[str, Any] | None = None
    ) -> Answer:
        """Send a request to any route, and return its answer as a value of the type ``answer``.

        Args:
            body: the fields of the request's body; those that are ``None`` are not sent.

        Raises: EngineError if there is no answer, or it is an error, or of another form.
        """
        return read_answer(await self._send(method, path, body), self.url, answer)

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        with translate_errors(self.url):
            json = None if body is None else _without_none(body)
            return await self._http.request(method, path, json=json, headers=self._further())

    def _further(self) -> dict[str, str]:
        """Return the further headers of a request, without those that the client has itself."""
        further, own = request_headers.get(), self._http.headers
        return {name: further[name] for name in further if name not in own}

    @asynccontextmanager
    async def _stream(
        self, path: str, body: Mapping[str, Any], read: ReadDeltas
    ) -> AsyncGenerator[AsyncGenerator[Delta]]:
        """Send a request and yield the steps of its answer. Leaving the context aborts it.

        Raises: EngineError if there is no answer, or it is an error or not a stream of events.
        """
        async with AsyncExitStack() as stack:
            response = await self._begin_answer(stack, "POST", path, json=_without_none(body))
            if not is_event_stream(response):
                raise bad_answer(self.url, path)
            yield await stack.enter_async_context(aclosing(self._read_deltas(response, read)))

    async def _begin_answer(
        self,
        stack: AsyncExitStack,
        method: str,
        path: str,
        headers: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> httpx.Response:
        """Send a request, and return its answer, which ``stack`` closes.

        Raises: EngineError if there is no answer, or it is an error.
        """
        # Not around what reads the answer: what its reader raises is not the engine's fault.
        with translate_errors(self.url):
            sending = self._http.stream(
                method, path, headers={**self._further(), **headers}, **options
            )
            response = await stack.enter_async_context(sending)
            if response.is_error:
                await response.aread()
                raise make_refusal(response, self.url)
        return response

    async def _read_deltas(
        self, response: httpx.Response, read: ReadDeltas
    ) -> AsyncGenerator[Delta]:
        try:
            with translate_errors(self.url):
                events = read_events(response)
                async with aclosing(events), aclosing(read(events)) as deltas:
                    async for delta in deltas:
                        yield delta
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise bad_answer(self.url, response.request.url.path) from error


def _renamed(state: StreamState, stream_id: str) -> StreamState:
    return state.model_copy(update={"id": stream_id})


def _without_none(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}
