"""Call an engine's HTTP API (:class:`EngineClient`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

import httpx

from flashmoa import errors
from flashmoa.engine import wire
from flashmoa.engine.connections import (
    Answer,
    answering_soon,
    ask,
    check_ttl,
    engine_url,
    flush_cache,
    make_http_client,
    stream_events,
)
from flashmoa.engine.generation import read_chat, read_generation
from flashmoa.engine.plain import PlainServer, WithoutPlugin, check_choice
from flashmoa.engine.wire import (
    Delta,
    EngineInfo,
    Prefilled,
    StreamState,
    kv_namespace,
    prompt_fields,
)

Messages = Sequence[Mapping[str, Any]]


class EngineClient:
    """A client of one SGLang server, with the plugin or without, or of another OpenAI server.

    Args:
        base_url: ``http://HOST:PORT``, with or without ``/v1``.
        api_key: the server's ``--api-key``, if it has one.
        timeout: seconds to wait for an answer, and for the next piece of a streamed one.
        headers: headers to send with every request.
        stream_ttl_seconds: how long the engine keeps a prompt stream of this client, for instance
            that of a link, once the client has vanished.
        namespace: the namespace of the KV of its prompt streams and chats, as :func:`kv_namespace`
            returns it.
        model: the served model's name, for servers that require it, or ``base:adapter``.
        without_plugin: what links do if the server does not have the plugin: ``prefill`` prompts in
            a few steps, as far as that pays (:class:`StepCosts`), or nothing (``off``).

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
        stream_ttl_seconds: float = 30.0,
        namespace: Mapping[str, str] | None = None,
        model: str | None = None,
        without_plugin: WithoutPlugin = "prefill",
    ) -> None:
        self.url = engine_url(base_url)
        self.stream_ttl_seconds = check_ttl(stream_ttl_seconds)
        self.model = model or "default"
        self.namespace = kv_namespace({"model": self.model, **(namespace or {})})
        self.without_plugin = check_choice(without_plugin)
        # Whether it has opened a prompt stream; ``None`` before it was asked to.
        self.has_plugin: bool | None = None
        # How links prefill if the server does not have the plugin.
        self.plain = PlainServer(self.ask, model)
        self._kv_pool_tokens: int | None = None
        self._http = make_http_client(self.url, api_key, timeout, headers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def info(self) -> EngineInfo:
        """Return the engine's model, capabilities and state."""
        return await self.ask("GET", "/flashmoa/info", EngineInfo)

    async def kv_pool_tokens(self) -> int:
        """Return the size of the engine's KV pool, which is asked for once, as :meth:`render`."""
        if self._kv_pool_tokens is None:
            async with answering_soon(self.url):
                self._kv_pool_tokens = sum(rank.total for rank in (await self.info()).kv)
        return self._kv_pool_tokens

    async def render(
        self,
        messages: Messages,
        *,
        template_args: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> str:
        """Return the prompt that the engine's chat template makes of ``messages``, as text.

        Without the plugin, see :meth:`PlainServer.render`.

        Args:
            template_args: the same as ``chat_template_kwargs``.
            fields: the request's other fields, as :func:`prompt_fields` returns them.

        Raises: EngineTimeout if the engine does not answer within 2 s after it was asked, whatever
            the client's timeout is; if it answered none, it is not asked again for some seconds.
        """
        fields = prompt_fields({"chat_template_kwargs": template_args, **fields})
        async with answering_soon(self.url):
            try:
                body = {"messages": list(messages), **fields}
                return (await self.ask("POST", "/render", wire.RenderedText, body)).text
            except errors.PluginMissing:
                if self.without_plugin == "off":
                    raise
                return await self.plain.render(messages, fields)

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
        return await self.ask("POST", "/prompt_streams", StreamState, body)

    async def append(
        self,
        stream_id: str,
        seq: int,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        end: bool = False,
    ) -> StreamState:
        """Append piece number ``seq``, counted from 0. Repeating this is harmless."""
        body = {"seq": seq, "text": text, "input_ids": input_ids, "end": end}
        return await self.ask("POST", f"/prompt_streams/{stream_id}/append", StreamState, body)

    async def keep_alive(self, stream_id: str) -> StreamState:
        """Extend the life of a prompt stream by its ``ttl_seconds``, as an append does.

        Raises: PluginMissing if the plugin is older than this route.
        """
        return await self.ask("POST", f"/prompt_streams/{stream_id}/keep_alive", StreamState)

    async def stream_state(self, stream_id: str) -> StreamState:
        """Return the state of a prompt stream."""
        return await self.ask("GET", f"/prompt_streams/{stream_id}", StreamState)

    async def delete_stream(self, stream_id: str) -> None:
        """End a prompt stream. It is not an error if the stream has ended already."""
        with suppress(errors.StreamGone, errors.StreamUnknown):
            await self.ask("DELETE", f"/prompt_streams/{stream_id}", wire.EmptyAnswer)

    async def flush_cache(self, wait_seconds: float = 30.0) -> None:
        """Empty the radix cache once the engine is idle.

        Raises: RequestRefused if requests are still running after ``wait_seconds``.
        """
        await flush_cache(self._http, self.url, wait_seconds)

    @asynccontextmanager
    async def generate(
        self,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        sampling: Mapping[str, Any] | None = None,
        prompt_stream_id: str | None = None,
        expected_output_tokens: int | None = None,
    ) -> AsyncGenerator[AsyncGenerator[Delta]]:
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
        async with stream_events(self._http, self.url, "/generate", body) as events:
            yield read_generation(events)

    @asynccontextmanager
    async def chat(
        self, messages: Messages, *, prompt_stream_id: str | None = None, **parameters: Any
    ) -> AsyncGenerator[AsyncGenerator[Delta]]:
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
        async with stream_events(self._http, self.url, "/v1/chat/completions", body) as events:
            yield read_chat(events)

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the tokens of each text, by the engine's tokenizer."""
        body = {"prompt": list(texts), "add_special_tokens": add_special_tokens}
        return (await self.ask("POST", "/tokenize", wire.TextsTokens, body)).tokens

    async def tokenize_chat(
        self,
        messages: Messages,
        *,
        template_args: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> list[int]:
        """Return the tokens of the prompt that :meth:`render` returns as text."""
        fields = prompt_fields({"chat_template_kwargs": template_args, **fields})
        body = {"messages": list(messages), **fields}
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
        """Send a request to any route, and return its answer as a value of the type ``answer``."""
        return await ask(self._http, self.url, method, path, answer, body)
