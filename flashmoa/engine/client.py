"""One typed client per engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from flashmoa.engine import errors
from flashmoa.engine.deltas import chat_completion, data_events, generation
from flashmoa.engine.wire import Delta, EngineInfo, Prefilled, StreamState

Answer = TypeVar("Answer", bound=BaseModel)
Messages = Sequence[Mapping[str, Any]]


def engine_url(base_url: str) -> str:
    """An engine's root from its own URL or its OpenAI one (``.../v1``)."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{base_url!r} is not an engine's URL; give http://HOST:PORT")
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


class EngineClient:
    """An SGLang server, with the plugin or without.

    Args:
        base_url: ``http://HOST:PORT``, with or without ``/v1``.
        api_key: what the server was started with, if anything.
        timeout: seconds for one answer, and between two pieces of a streamed one.
        headers: sent with every request.

    Every method raises :class:`EngineUnreachable`, :class:`EngineTimeout` and
    :class:`BadAnswer`; those that use the plugin's routes also :class:`PluginMissing` and
    :class:`RequestRefused` (see ``errors.py``). Close it, or use it as a context manager.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout = 600.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url = engine_url(base_url)
        sent = dict(headers or {})
        if api_key:
            sent["Authorization"] = f"Bearer {api_key}"
        if not isinstance(timeout, httpx.Timeout):
            timeout = httpx.Timeout(timeout, connect=10.0)
        self._http = httpx.AsyncClient(base_url=self.url, headers=sent, timeout=timeout)

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
        cache_salt: str | None = None,
    ) -> Prefilled:
        """Compute a prompt's KV and leave it in the engine's radix cache."""
        body = {
            "text": text,
            "input_ids": input_ids,
            "messages": messages,
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
        cache_salt: str | None = None,
    ) -> StreamState:
        """Open a prompt stream with its first piece.

        Args:
            add_special_tokens: ``False`` for text rendered by a chat template, which carries
                its own.
        """
        body = {
            "text": text,
            "input_ids": input_ids,
            "add_special_tokens": add_special_tokens,
            "ttl_seconds": ttl_seconds,
            "cache_salt": cache_salt,
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

    async def _call(
        self,
        method: str,
        path: str,
        answer: type[Answer] | None,
        body: Mapping[str, Any] | None = None,
    ) -> Answer:
        sent = None if body is None else {k: v for k, v in body.items() if v is not None}
        with _translated(self.url):
            response = await self._http.request(method, path, json=sent)
        if response.is_error:
            raise _refusal(response, self.url)
        if answer is None:
            return _Ignored()  # type: ignore[return-value]
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            raise errors.BadAnswer(f"{self.url}{path} answered something else: {error}") from error

    @asynccontextmanager
    async def _events(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[AsyncGenerator[dict[str, Any]]]:
        sent = {k: v for k, v in body.items() if v is not None}
        with _translated(self.url):
            async with self._http.stream("POST", path, json=sent) as response:
                if response.is_error:
                    await response.aread()
                    raise _refusal(response, self.url)
                yield data_events(response)


class _Rendered(BaseModel):
    text: str


class _Ignored(BaseModel):
    pass


class _translated:
    """Turn httpx's exceptions into ours."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, httpx.TimeoutException):
            raise errors.EngineTimeout(f"{self._url} did not answer in time") from error
        if isinstance(error, httpx.TransportError):
            raise errors.EngineUnreachable(
                f"{self._url} cannot be reached ({error}); is the engine running?"
            ) from error


def _refusal(response: httpx.Response, url: str) -> errors.EngineError:
    try:
        problem = response.json()["error"]
        message, code = str(problem["message"]), str(problem["code"])
    except (ValueError, KeyError, TypeError):
        if response.status_code in (404, 405):
            return errors.PluginMissing(
                f"{url} does not have {response.request.url.path}: it runs without the "
                "flashmoa-sglang plugin"
            )
        message, code = response.text[:500], "error"
    kind = errors.BY_STATUS.get(response.status_code, errors.RequestRefused)
    if kind is errors.StreamUnknown and code != "unknown_stream":
        return errors.PluginMissing(f"{url} has no prompt streams: {message}")
    return kind(message, response.status_code, code)
