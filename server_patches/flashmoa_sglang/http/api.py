"""The plugin's HTTP routes, in SGLang's own application.

They are subject to SGLang's API key, metrics and CORS like any other route. Bodies are
checked here in full, because what reaches a scheduler must not be able to crash it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from flashmoa_sglang import __version__, releases
from flashmoa_sglang.costs import UNMEASURED
from flashmoa_sglang.http import bodies
from flashmoa_sglang.http.client_requests import check_ids
from flashmoa_sglang.http.engine import Engine
from flashmoa_sglang.http.errors import (
    ApiError,
    DecodesOnly,
    EngineDraining,
    EngineFailed,
    MalformedRequest,
    PromptTooLarge,
)
from flashmoa_sglang.http.rendering import ChatRenderer, Rendered
from flashmoa_sglang.http.stream import PromptStream, Superseded
from flashmoa_sglang.http.streams import StreamTable
from flashmoa_sglang.http.token_buffer import TokenBuffer
from flashmoa_sglang.kv_free import KEEPS_NONE

CAPABILITIES = ["prefill_only", "render", "prompt_streams", "prompt_stream_id"]
# Of an engine that keeps no KV of prompts: without a KV cache, or the decode engine of a PD pair.
_WITHOUT_KV = ["render"]
# What proxies write in their logs for it.
_CLIENT_GONE = 499
Handler = Callable[[Request], Awaitable[Any]]


class Api:
    """The routes and what they work on."""

    def __init__(self, engine: Engine, table: StreamTable, renderer: ChatRenderer) -> None:
        self._engine = engine
        self._table = table
        self._renderer = renderer

    def add_to(self, app: FastAPI) -> None:
        """Add the routes, in front of SGLang's hundred: an append comes with every few tokens.

        Each by itself: SGLang counts a router's routes by the path that was asked for, and that
        would be a time series per stream.
        """
        usual = len(app.router.routes)
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/flashmoa/info", self.info),
            ("POST", "/prefill_only", self.prefill_only),
            ("POST", "/render", self.render),
            ("POST", "/prompt_streams", self.open),
            ("GET", "/prompt_streams", self.count),
            ("GET", "/prompt_streams/{stream_id}", self.state),
            ("POST", "/prompt_streams/{stream_id}/append", self.append),
            ("POST", "/prompt_streams/{stream_id}/keep_alive", self.keep_alive),
            ("DELETE", "/prompt_streams/{stream_id}", self.delete),
        ]
        for method, path, handler in routes:
            app.add_api_route(path, _answering(handler), methods=[method])
        ours = app.router.routes[usual:]
        app.router.routes[:] = ours + app.router.routes[:usual]
        logging.getLogger("uvicorn.access").addFilter(_is_no_append)

    async def info(self, request: Request) -> dict[str, Any]:
        tokenizer = self._engine.tokenizer
        return {
            "plugin": {"name": "flashmoa-sglang", "version": __version__},
            "sglang": {"version": releases.installed()},
            "capabilities": CAPABILITIES
            if self._engine.keeps_kv and self._engine.role != "decode"
            else _WITHOUT_KV,
            "role": self._engine.role,
            "hooks": request.app.state.flashmoa_hooks,
            "model": self._engine.model,
            "tokenizer": {
                "digest": tokenizer.digest() if tokenizer else None,
                "cuts": tokenizer.boundaries if tokenizer else [],
            },
            "context_length": self._engine.context_length,
            "costs": asdict(self._engine.costs) if self._engine.costs is not UNMEASURED else None,
            "saturation": asdict(found) if (found := self._engine.saturation) else None,
            "prefills_wait_for": self._engine.waits_for,
            "max_prompt_tokens": self._engine.max_prompt_tokens,
            "limits": asdict(self._table.limits),
            "prompt_streams": len(self._table),
            "in_flight": self._engine.in_flight(),
            "kv": [asdict(report) for report in await self._engine.kv()],
        }

    async def prefill_only(self, request: Request) -> dict[str, Any]:
        self._check_kept()
        prompt = await bodies.parse(request, bodies.Prompt)
        ids = self._tokens(prompt)
        if not ids:
            raise MalformedRequest("The prompt is empty; there is nothing to prefill.")
        self._check_room(len(ids))
        if self._engine.draining:
            raise EngineDraining("The server is shutting down; use another engine.")
        try:
            done = await self._engine.prefill(
                ids,
                terms=prompt.terms(self._engine.model["name"]),
                http_request=request,
            )
        except Superseded as error:
            raise EngineFailed(f"The prefill was aborted: {error}") from error
        return {
            "prompt_tokens": done.prompt_tokens,
            "cached_tokens": done.cached_tokens,
            "prefilled_tokens": done.prompt_tokens - done.cached_tokens,
            "seconds": done.seconds,
        }

    async def render(self, request: Request) -> dict[str, Any]:
        prompt = await bodies.parse(request, bodies.Prompt)
        if prompt.messages is None:
            raise MalformedRequest("/render takes messages.")
        return {"text": self._render(prompt).text}

    async def open(self, request: Request) -> dict[str, Any]:
        self._check_kept()
        body = await bodies.parse(request, bodies.OpenStream)
        kind = body.one_of("messages")
        limits = self._table.limits
        buffer: TokenBuffer | None = None
        piece: str | list[int]
        if kind == "input_ids":
            piece = self._checked_ids(body.input_ids or [])
        else:
            buffer, piece = self._buffer(body)
        stream = PromptStream(
            ttl_seconds=min(body.ttl_seconds or limits.default_ttl_seconds, limits.ttl_seconds),
            buffer=buffer,
            terms=replace(
                body.terms(self._engine.model["name"]), dp_rank=self._table.rank_for(piece)
            ),
        )
        self._table.add(stream, piece)
        self._table.open(stream)
        return stream.state()

    async def append(self, request: Request) -> dict[str, Any]:
        body = await bodies.parse(request, bodies.Append)
        stream = self._table.get(request.path_params["stream_id"])
        piece: str | list[int] = body.text or ""
        if not body.end or body.text is not None or body.input_ids is not None:
            kind = body.one_of()
            expected = "input_ids" if stream.buffer is None else "text"
            if kind != expected:
                raise MalformedRequest(
                    f"This stream was opened with {expected}; append {expected}."
                )
            if kind == "input_ids":
                piece = self._checked_ids(body.input_ids or [])
        self._table.append(stream, body.seq, piece, body.end)
        return stream.state()

    async def keep_alive(self, request: Request) -> dict[str, Any]:
        stream = self._table.get(request.path_params["stream_id"])
        self._table.keep_alive(stream)
        return stream.state()

    async def count(self, _request: Request) -> dict[str, Any]:
        # Not which: every client that knows a stream's id may use it.
        return {"open": len(self._table)}

    async def state(self, request: Request) -> dict[str, Any]:
        return self._table.get(request.path_params["stream_id"]).state()

    async def delete(self, request: Request) -> dict[str, Any]:
        stream = self._table.get(request.path_params["stream_id"])
        self._table.close(stream, "deleted")
        return {"id": stream.id, "freed_tokens": stream.prefilled}

    def _tokens(self, prompt: bodies.Prompt) -> list[int]:
        if prompt.one_of("messages") == "input_ids":
            return self._checked_ids(prompt.input_ids or [])
        buffer, text = self._buffer(prompt)
        room = self._engine.max_prompt_tokens
        if len(text) > room * self._table.limits.characters_per_token:
            self._check_room(len(text))
        buffer.append(text)
        return buffer.all_tokens()

    def _buffer(self, prompt: bodies.Prompt) -> tuple[TokenBuffer, str]:
        """Make a buffer for a prompt's text; return it with the text to begin with."""
        if prompt.messages is not None:
            return self._render(prompt).buffer(self._tokenizer())
        return TokenBuffer(self._tokenizer(), prompt.add_special_tokens), prompt.text or ""

    def _render(self, prompt: bodies.Prompt) -> Rendered:
        self._tokenizer()
        return self._renderer.render(prompt.chat())

    def _tokenizer(self) -> Any:
        if self._engine.tokenizer is None:
            raise MalformedRequest("This server has no tokenizer for text prompts; send input_ids.")
        return self._engine.tokenizer

    def _checked_ids(self, ids: list[int]) -> list[int]:
        try:
            check_ids(ids, self._engine.vocabulary)
        except ValueError as error:
            raise MalformedRequest(str(error)) from error
        return ids

    def _check_kept(self) -> None:
        if self._engine.role == "decode":
            raise DecodesOnly("This engine decodes what another one prefills; send it there.")
        if not self._engine.keeps_kv:
            raise MalformedRequest(f"{KEEPS_NONE}: there is nothing to prefill for.")

    def _check_room(self, tokens: int) -> None:
        room = self._engine.max_prompt_tokens
        if tokens > room:
            raise PromptTooLarge(
                f"The prompt has {tokens} tokens; this server takes {room}.", max_tokens=room
            )


def _is_no_append(record: logging.LogRecord) -> bool:
    """Drop appends from the access log, which would have a line for every few tokens."""
    fields = record.args
    return not (
        isinstance(fields, tuple) and len(fields) > 2 and f"{fields[2]}".endswith("/append")
    )


def _answering(handler: Handler) -> Handler:
    """Turn :class:`ApiError` into its answer."""

    async def answer(request: Request) -> Any:
        try:
            return JSONResponse(await handler(request))
        except ApiError as error:
            return JSONResponse(error.body(), status_code=error.status)
        except ClientDisconnect:
            # It is not read; raised, it would be a stack trace in the log for each lost client.
            return JSONResponse(None, status_code=_CLIENT_GONE)

    return answer
