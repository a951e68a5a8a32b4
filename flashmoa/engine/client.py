"""One typed client per engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from math import isfinite
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from flashmoa import errors
from flashmoa.engine.connections import CONNECTIONS
from flashmoa.engine.deltas import chat_completion, data_events, generation
from flashmoa.engine.logprobs import Generated, NextLogprobs
from flashmoa.engine.refusals import not_an_engine, refusal, translated
from flashmoa.engine.urls import engine_url
from flashmoa.engine.wire import Delta, EngineInfo, Prefilled, StreamState

Answer = TypeVar("Answer", bound=BaseModel)
Messages = Sequence[Mapping[str, Any]]


class EngineClient:
    """An SGLang server, with the plugin or without.

    Args:
        base_url: ``http://HOST:PORT``, with or without ``/v1``.
        api_key: what the server was started with, if anything.
        timeout: seconds for one answer, and between two pieces of a streamed one.
        headers: sent with every request.
        stream_ttl_seconds: how long the engine keeps a prompt stream of this client, of a link for
            instance, once the client has vanished.
        namespace: of its prompt streams' KV, as :func:`kv_namespace` tells it of a request.

    Every method raises :class:`EngineUnreachable`, :class:`EngineTimeout` and
    :class:`BadAnswer`; those that use the plugin's routes also :class:`PluginMissing` and
    :class:`RequestRefused` (see ``flashmoa.errors``). Close it, or use it as a context manager.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout = 600.0,
        headers: Mapping[str, str] | None = None,
        stream_ttl_seconds: float = 30.0,
        namespace: Mapping[str, str] | None = None,
    ) -> None:
        self.url = engine_url(base_url)
        self._namespace = dict(namespace or {})
        self.stream_ttl_seconds = checked_ttl(stream_ttl_seconds)
        sent = dict(headers or {})
        if api_key:
            sent["Authorization"] = f"Bearer {api_key}"
        if not isinstance(timeout, httpx.Timeout):
            timeout = httpx.Timeout(timeout, connect=10.0)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=sent,
            timeout=timeout,
            limits=CONNECTIONS,
            # Reading the certificates takes 20 ms, and the event loop with it.
            verify=self.url.startswith("https://"),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def info(self) -> EngineInfo:
        """What the engine is and can do."""
        return await self._call("GET", "/flashmoa/info", EngineInfo)

    async def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text the engine's chat template makes of ``messages``."""
        body: dict[str, Any] = {"messages": list(messages), "tools": tools or None}
        body["chat_template_kwargs"] = template_args or None
        return (await self._call("POST", "/render", _Rendered, body)).text

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
        return await self._call("POST", "/prefill_only", Prefilled, body)

    async def open_stream(
        self,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        add_special_tokens: bool | None = None,
        ttl_seconds: float | None = None,
        namespace: Mapping[str, str] | None = None,
    ) -> StreamState:
        """Open a prompt stream with its first piece.

        Args:
            add_special_tokens: ``False`` for text rendered by a chat template, which carries
                its own.
            namespace: as the client's, and in its place.
        """
        body = {
            "text": text,
            "input_ids": input_ids,
            "add_special_tokens": add_special_tokens,
            "ttl_seconds": ttl_seconds,
            **(self._namespace if namespace is None else namespace),
        }
        return await self._call("POST", "/prompt_streams", StreamState, body)

    async def append(
        self,
        stream_id: str,
        seq: int,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        end: bool = False,
    ) -> StreamState:
        """Add the ``seq``-th piece (from 0); repeating one is harmless."""
        body = {"seq": seq, "text": text, "input_ids": input_ids, "end": end}
        return await self._call("POST", f"/prompt_streams/{stream_id}/append", StreamState, body)

    async def keep_alive(self, stream_id: str) -> StreamState:
        """Have a prompt stream live on for its ``ttl_seconds``, as an append does.

        Raises: PluginMissing where the plugin is older than this route.
        """
        return await self._call("POST", f"/prompt_streams/{stream_id}/keep_alive", StreamState)

    async def stream_state(self, stream_id: str) -> StreamState:
        return await self._call("GET", f"/prompt_streams/{stream_id}", StreamState)

    async def delete_stream(self, stream_id: str) -> None:
        """End a prompt stream; one that is gone already is no error."""
        try:
            await self._call("DELETE", f"/prompt_streams/{stream_id}", _Ignored)
        except (errors.StreamGone, errors.StreamUnknown):
            return

    async def flush_cache(self, wait_seconds: float = 30.0) -> None:
        """Empty the radix cache once the engine is idle.

        Raises: RequestRefused if requests are still running after ``wait_seconds``.
        """
        await self._call("POST", f"/flush_cache?timeout={wait_seconds}", None)

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

        ``sampling``: SGLang's sampling parameters. ``expected_output_tokens``: for an engine
        that schedules by it.
        """
        body = {
            "text": text,
            "input_ids": input_ids,
            "sampling_params": dict(sampling or {}),
            "prompt_stream_id": prompt_stream_id,
            "expected_output_tokens": expected_output_tokens,
            "stream": True,
        }
        async with self._events("/generate", body) as events:
            yield generation(events)

    @asynccontextmanager
    async def chat(
        self,
        messages: Messages,
        *,
        prompt_stream_id: str | None = None,
        **parameters: Any,
    ) -> AsyncGenerator[AsyncGenerator[Delta]]:
        """Stream a chat completion. Leaving the context aborts it.

        ``parameters``: of OpenAI's chat completions, and SGLang's own.
        """
        body = {
            "model": "default",
            **parameters,
            "messages": list(messages),
            "prompt_stream_id": prompt_stream_id,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self._events("/v1/chat/completions", body) as events:
            yield chat_completion(events)

    async def next_logprobs(
        self,
        input_ids: Sequence[int],
        token_ids: Sequence[int] = (),
        *,
        continuation: Sequence[int] = (),
        prompt_stream_id: str | None = None,
    ) -> NextLogprobs:
        """Log-probabilities of what may follow a prompt, from one prefill; nothing is decoded.

        Stock SGLang does it, too.

        Args:
            token_ids: tokens that may follow the prompt and its continuation.
            continuation: tokens that follow the prompt.

        Raises: MalformedRequest for a prompt that is too long, or a token there is not.
        """
        body = {
            "input_ids": [*input_ids, *continuation],
            # Requests of one batch are sampled together where one of them decodes, and SGLang's
            # log-probabilities are then those at their temperatures.
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            # SGLang tells them from the token after this one on, and of nothing before it.
            "logprob_start_len": len(input_ids) - 1 if continuation else -1,
            "token_ids_logprob": list(token_ids) or None,
            "prompt_stream_id": prompt_stream_id,
        }
        answer = await self._call("POST", "/generate", Generated, body)
        return answer.logprobs(token_ids, continuation)

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """The tokens of each text, by the engine's tokenizer."""
        body = {"prompt": list(texts), "add_special_tokens": add_special_tokens}
        return (await self._call("POST", "/tokenize", _EachTokens, body)).tokens

    async def tokenize_chat(
        self, messages: Messages, *, template_args: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The tokens of the prompt that the engine's chat template makes of ``messages``."""
        body = {"messages": list(messages), "chat_template_kwargs": template_args or None}
        return (await self._call("POST", "/tokenize", _Tokens, body)).tokens

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones and all."""
        body = {"tokens": list(token_ids), "skip_special_tokens": False}
        return (await self._call("POST", "/detokenize", _Rendered, body)).text

    async def embed(self, texts: Sequence[str], *, model: str = "default") -> list[list[float]]:
        """A vector for each text, of an engine that serves an embedding model."""
        body = {"model": model, "input": list(texts)}
        answer = await self._call("POST", "/v1/embeddings", _Embedded, body)
        return [one.embedding for one in sorted(answer.data, key=lambda one: one.index)]

    async def _call(
        self,
        method: str,
        path: str,
        answer: type[Answer] | None,
        body: Mapping[str, Any] | None = None,
    ) -> Answer:
        sent = None if body is None else {k: v for k, v in body.items() if v is not None}
        with translated(self.url):
            response = await self._http.request(method, path, json=sent)
        if response.is_error:
            raise refusal(response, self.url)
        if answer is None:
            return _Ignored()  # type: ignore[return-value]
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            raise errors.BadAnswer(not_an_engine(self.url, path)) from error

    @asynccontextmanager
    async def _events(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[AsyncGenerator[dict[str, Any]]]:
        sent = {k: v for k, v in body.items() if v is not None}
        with translated(self.url):
            async with self._http.stream("POST", path, json=sent) as response:
                if response.is_error:
                    await response.aread()
                    raise refusal(response, self.url)
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    raise errors.BadAnswer(not_an_engine(self.url, path))
                yield data_events(response)


def checked_ttl(seconds: float) -> float:
    """A prompt stream's lifetime, in seconds. Raises: ValueError."""
    if not (isfinite(seconds) and seconds > 0):
        raise ValueError(f"stream_ttl_seconds must be a positive number, not {seconds!r}")
    return seconds


class _Rendered(BaseModel):
    text: str


class _Tokens(BaseModel):
    tokens: list[int]


class _EachTokens(BaseModel):
    tokens: list[list[int]]


class _Vector(BaseModel):
    index: int
    embedding: list[float]


class _Embedded(BaseModel):
    data: list[_Vector]


class _Ignored(BaseModel):
    pass
