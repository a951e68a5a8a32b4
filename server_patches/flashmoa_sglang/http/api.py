"""The plugin's HTTP routes, in SGLang's own application.

SGLang's API key, metrics and CORS apply to them like to any other route. Bodies are checked here
completely, because an invalid one could crash a scheduler.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from flashmoa_sglang import __version__
from flashmoa_sglang.costs import UNMEASURED
from flashmoa_sglang.http import bodies
from flashmoa_sglang.http.bodies import PromptReader
from flashmoa_sglang.http.engine import Engine
from flashmoa_sglang.http.errors import (
    ApiError,
    EngineBusy,
    EngineDraining,
    MalformedRequest,
    shown,
)
from flashmoa_sglang.http.hearing.calls import (
    CALL_HEADER,
    CHANNEL_HEADER,
    HeardCalls,
    read_id,
)
from flashmoa_sglang.http.rendering import ChatRenderer
from flashmoa_sglang.http.scoring.routes import ScoringApi
from flashmoa_sglang.http.stream import CallText, PromptStream
from flashmoa_sglang.http.streams import StreamTable
from flashmoa_sglang.http.tokens.token_buffer import TokenBuffer
from flashmoa_sglang.messages import RequestMark
from flashmoa_sglang.sglang import releases
from flashmoa_sglang.sglang.options import Options

_KV_CAPABILITIES = ["prefill_only", "prompt_streams", "prompt_stream_id", "hint_headers"]
_SHUTS_DOWN = "The server is shutting down; use another engine."
Handler = Callable[[Request], Awaitable[Any]]


class Api:
    """Answers requests to the plugin's routes."""

    def __init__(
        self,
        engine: Engine,
        table: StreamTable,
        renderer: ChatRenderer,
        calls: HeardCalls | None = None,
    ) -> None:
        self._calls = calls
        self._engine = engine
        self._table = table
        self._renderer = renderer
        self._reader = PromptReader(engine, renderer, table.limits.characters_per_token)
        self._scores = Options.from_environment().scoring == "on"

    def add_to(self, app: FastAPI) -> None:
        routes: list[tuple[str, str, Handler]] = [
            # SGLang asks for no API key where a path begins with /health.
            ("GET", "/health/ready", self.ready),
            ("GET", "/flashmoa/info", self.info),
            ("POST", "/prefill_only", self.prefill_only),
            ("POST", "/render", self.render),
            ("POST", "/render_response", self.render_response),
            ("POST", "/prompt_streams", self.open),
            ("GET", "/prompt_streams", self.count),
            ("GET", "/prompt_streams/{stream_id}", self.state),
            ("POST", "/prompt_streams/{stream_id}/append", self.append),
            ("POST", "/prompt_streams/{stream_id}/keep_alive", self.keep_alive),
            ("DELETE", "/prompt_streams/{stream_id}", self.delete),
        ]
        if self._calls is not None:
            routes.append(("GET", "/flashmoa/calls", self.hear))
        if self._scores:
            scoring = ScoringApi(self._engine, self._reader, self._renderer, self._table)
            routes += [
                ("POST", "/rerank", scoring.rerank),
                ("POST", "/v1/rerank", scoring.rerank),
                ("POST", "/v2/rerank", scoring.rerank),
                ("POST", "/v1/classify", scoring.classify),
            ]
            # With --enable-mis, SGLang packs the items into one prompt, which is faster.
            if not self._engine.packs_items:
                routes.append(("POST", "/v1/score", scoring.score))
        add_routes(app, routes)
        logging.getLogger("uvicorn.access").addFilter(_is_logged)

    async def ready(self, _request: Request) -> dict[str, Any]:
        """Answer whether new requests may come. SGLang's /health would decode a token."""
        if self._engine.draining:
            raise EngineDraining(_SHUTS_DOWN)
        if self._engine.warming_up:
            raise EngineBusy("The server is warming up; ask again in a few seconds.")
        return {"status": "ready"}

    async def info(self, _request: Request) -> dict[str, Any]:
        tokenizer = self._engine.tokenizer
        ranks = await self._engine.kv()
        return {
            "plugin": {"name": "flashmoa-sglang", "version": __version__},
            "sglang": {"version": releases.installed()},
            "capabilities": self._capabilities(),
            "role": self._engine.role,
            "model": self._engine.model,
            "tokenizer": {"digest": tokenizer.digest if tokenizer else None},
            "context_length": self._engine.context_length,
            "costs": asdict(self._engine.costs) if self._engine.costs is not UNMEASURED else None,
            "saturation": asdict(saturation) if (saturation := self._engine.saturation) else None,
            "prefills_wait_for": self._engine.waits_for,
            "largest_forward": self._engine.largest_forward(ranks),
            "data_parallel_ranks": self._engine.data_parallel_ranks,
            "max_prompt_tokens": self._engine.max_prompt_tokens,
            "limits": asdict(self._table.limits),
            "prompt_streams": len(self._table),
            "streamed_tokens": self._table.streamed,
            "in_flight": {
                **self._engine.in_flight(),
                **(self._calls.in_flight() if self._calls else {}),
            },
            "kv": [asdict(report) for report in ranks],
        }

    async def hear(self, request: Request) -> StreamingResponse:
        calls = self._calls
        assert calls is not None
        lines = calls.listen(request.headers.get(CHANNEL_HEADER))
        return StreamingResponse(lines, media_type="application/x-ndjson")

    def _capabilities(self) -> list[str]:
        prefills = self._engine.role != "decode"
        scores = prefills and self._scores and not self._engine.packs_items
        keeps_kv = prefills and self._engine.why_no_kv() is None
        return [
            "render",
            *(["calls"] if self._hears else ()),
            *(["scoring"] if scores else ()),
            *(_KV_CAPABILITIES if keeps_kv else ()),
            *(["follow"] if keeps_kv and self._hears else ()),
        ]

    @property
    def _hears(self) -> bool:
        return self._calls is not None and self._engine.role != "prefill"

    async def prefill_only(self, request: Request) -> dict[str, Any]:
        self._engine.require_kv()
        prompt = await bodies.parse(request, bodies.Prompt)
        ids = await self._reader.tokenize(prompt)
        if not ids:
            raise MalformedRequest("The prompt is empty; there is nothing to prefill.")
        self._reader.check_room(len(ids))
        if self._engine.draining:
            raise EngineDraining(_SHUTS_DOWN)
        terms = prompt.terms(self._engine.model["name"])
        terms = replace(terms, dp_rank=self._table.named_rank(request))
        started = time.perf_counter()
        mark = RequestMark(own=True)
        meta = await self._engine.generate(ids, mark, terms=terms, http_request=request)
        return {
            "prompt_tokens": meta["prompt_tokens"],
            "cached_tokens": meta["cached_tokens"],
            "prefilled_tokens": meta["prompt_tokens"] - meta["cached_tokens"],
            "seconds": time.perf_counter() - started,
        }

    async def render(self, request: Request) -> dict[str, Any]:
        prompt = await bodies.parse(request, bodies.Prompt)
        if prompt.messages is None:
            raise MalformedRequest("/render needs messages; this body has none.")
        return {"text": self._reader.render(prompt).text}

    async def render_response(self, request: Request) -> dict[str, Any]:
        from sglang.srt.entrypoints.openai.protocol import ResponsesRequest

        self._reader.require_tokenizer()
        body = await bodies.parse(request, ResponsesRequest)
        return {"text": (await self._renderer.render_response(body)).text}

    async def open(self, request: Request) -> dict[str, Any]:
        self._engine.require_kv()
        body = await bodies.parse(request, bodies.OpenStream)
        kind = body.one_of("messages")
        rank = self._table.named_rank(request)
        limits = self._table.limits
        buffer: TokenBuffer | None = None
        piece: str | list[int]
        if kind == "input_ids":
            piece = self._reader.check_ids(body.input_ids or [])
        else:
            buffer, piece = await self._reader.new_buffer(body)
        stream = PromptStream(
            ttl_seconds=min(body.ttl_seconds or limits.default_ttl_seconds, limits.ttl_seconds),
            buffer=buffer,
            terms=replace(
                body.terms(self._engine.model["name"]),
                dp_rank=self._table.rank_for(piece) if rank is None else rank,
            ),
        )
        if isinstance(piece, str):
            # The client does not know how long its messages are once they are rendered.
            stream.counted_from = len(piece) if kind == "messages" else 0
            await self._table.add_text(stream, piece)
        else:
            self._table.add(stream, piece)
        self._table.open(stream)
        return stream.state()

    async def append(self, request: Request) -> dict[str, Any]:
        body = await bodies.parse(request, bodies.Append)
        stream = self._table.get(request.path_params["stream_id"])
        piece: str | list[int] | CallText = body.text or ""
        # An append that ends the stream may have no text.
        if not body.end or (body.text, body.input_ids, body.call) != (None, None, None):
            kind = body.one_of("call")
            expected = "input_ids" if stream.buffer is None else "text"
            if kind != expected and (kind != "call" or expected != "text"):
                raise MalformedRequest(
                    f"This stream was opened with {expected}; append {expected}."
                )
            if kind == "input_ids":
                piece = self._reader.check_ids(body.input_ids or [])
            elif kind == "call":
                piece = CallText(self._followed(body))
        await self._table.append(stream, body.seq, piece, body.end, body.start)
        return stream.state()

    def _followed(self, body: bodies.Append) -> str:
        """Return the id of the call that a stream is to follow."""
        if not self._hears:
            raise MalformedRequest("This engine hears no calls; append their text instead.")
        if body.end:
            raise MalformedRequest("A stream that follows a call has not ended; leave end out.")
        if (call_id := read_id(body.call)) is None:
            raise MalformedRequest(
                f"call must have the 32 hexadecimal digits of the call's header {CALL_HEADER}, not "
                f"{shown(body.call)}."
            )
        return call_id

    async def keep_alive(self, request: Request) -> dict[str, Any]:
        stream = self._table.get(request.path_params["stream_id"])
        self._table.keep_alive(stream)
        return stream.state()

    async def count(self, _request: Request) -> dict[str, Any]:
        # No route lists ids, because every client that knows a stream's id may use the stream.
        return {"open": len(self._table)}

    async def state(self, request: Request) -> dict[str, Any]:
        return self._table.get(request.path_params["stream_id"]).state()

    async def delete(self, request: Request) -> dict[str, Any]:
        stream_id = request.path_params["stream_id"]
        if (figures := self._table.take_figures(stream_id)) is not None:
            return {"id": stream_id, "freed_tokens": 0, "usage": figures}
        stream = self._table.get(stream_id)
        self._table.close(stream, "deleted")
        return {"id": stream_id, "freed_tokens": stream.prefilled}


def add_routes(app: FastAPI, routes: Iterable[tuple[str, str, Handler]]) -> None:
    """Add routes before SGLang's hundred, because there is an append for every few tokens.

    A router would not do: SGLang's metrics count a router's routes by the path of the request,
    which would make a time series for each stream.

    Args: routes: for each, its method, path and handler.
    """
    sglang_routes = list(app.router.routes)
    for method, path, handler in routes:
        app.add_api_route(path, _make_endpoint(handler), methods=[method])
    own_routes = app.router.routes[len(sglang_routes) :]
    app.router.routes[:] = own_routes + sglang_routes


def refuse_nesting(_request: Request, _error: Exception) -> Response:
    """Answer a body whose nesting Python fails to follow, on any route."""
    error = MalformedRequest("The body is nested too deeply; flatten it.")
    return JSONResponse(error.body(), status_code=error.status)


def _is_logged(record: logging.LogRecord) -> bool:
    """Filter requests to single streams, and probes, out of the access log.

    A reader of the log who finds a stream's id could use the stream. Clients append every few
    tokens, and routers and ``flashmoa serve`` probe every two seconds or less.
    """
    line = record.getMessage()
    return "/prompt_streams/" not in line and " /health/ready " not in line


def _make_endpoint(handler: Handler) -> Handler:
    """Wrap a handler so that an :class:`ApiError` becomes its HTTP response."""

    async def answer(request: Request) -> Any:
        try:
            answer = await handler(request)
            return answer if isinstance(answer, Response) else JSONResponse(answer)
        except ApiError as error:
            return JSONResponse(error.body(), status_code=error.status)
        except ClientDisconnect:
            # No client reads this response, but an exception would be a stack trace in the log.
            # Proxies log this status for a client that has disconnected.
            return JSONResponse(None, status_code=499)

    return answer
