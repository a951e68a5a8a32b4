"""A Mixture-of-Agents as one model of an OpenAI-compatible server."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from flashmoa._starlette import while_connected
from flashmoa.moa.config import MixtureConfig
from flashmoa.moa.mixture import MixtureOfAgents
from flashmoa.moa.prompts import Messages, conversation
from flashmoa.moa.results import MixtureFailed, MixtureResult


def application(config: MixtureConfig) -> Starlette:
    """Return an application with ``/v1/chat/completions``, ``/v1/models`` and ``/health``.

    Sampling parameters come from the configuration. Of a request's body, only ``messages``,
    ``model`` and ``stream`` are read. Usage has the last aggregator's tokens, and under
    ``flashmoa`` those of all agents.
    """
    served: dict[str, MixtureOfAgents] = {}

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            served[config.name] = await config.build(stack)
            yield

    async def complete(request: Request) -> Response:
        try:
            body = await request.json()
            question = conversation(body["messages"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return _refusal(400, f"the body is not a chat completion request: {error}")
        if body.get("model", config.name) != config.name:
            wanted = f"there is no model {body['model']!r}; ask for {config.name!r}"
            return _refusal(404, wanted)
        mixture = served[config.name]
        if body.get("stream"):
            chunks = _chunks(mixture, config.name, question)
            return StreamingResponse(chunks, media_type="text/event-stream")
        try:
            async with while_connected(request):
                result = await mixture.answer(question)
                return JSONResponse(_completion(config.name, result))
        except MixtureFailed as error:
            return _refusal(502, str(error))
        return Response(status_code=499)  # The client has disconnected and will not read this.

    async def models(_request: Request) -> Response:
        model = {"id": config.name, "object": "model", "owned_by": "flashmoa"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(_request: Request) -> Response:
        return Response(status_code=200)

    routes = [
        Route("/v1/chat/completions", complete, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def _refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)


def _head(kind: str, model: str) -> dict[str, Any]:
    name = f"chatcmpl-{secrets.token_hex(12)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def _completion(model: str, result: MixtureResult) -> dict[str, Any]:
    message = {"role": "assistant", "content": result.text}
    choice = {"index": 0, "message": message, "finish_reason": result.finish_reason or "stop"}
    return {**_head("chat.completion", model), "choices": [choice], "usage": _usage(result)}


async def _chunks(mixture: MixtureOfAgents, model: str, question: Messages) -> AsyncGenerator[str]:
    """Yield the server-sent events of an answer."""
    head = _head("chat.completion.chunk", model)

    def event(delta: dict[str, Any], reason: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return f"data: {json.dumps({**head, 'choices': [choice], **more})}\n\n"

    try:
        async with mixture.answering(question) as run:
            yield event({"role": "assistant", "content": ""})
            async for piece in run:
                yield event({"content": piece})
            result = await run.result()
        yield event({}, result.finish_reason or "stop", usage=_usage(result))
    except MixtureFailed as error:
        yield f"data: {json.dumps({'error': {'message': str(error), 'code': 502}})}\n\n"
    yield "data: [DONE]\n\n"


def _usage(result: MixtureResult) -> dict[str, Any]:
    last = result.final.usage
    agents = [one for layer in result.layers for one in layer]
    prompt, written = (last.prompt_tokens, last.completion_tokens) if last else (0, 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "flashmoa": {
            "prompt_tokens": sum(one.usage.prompt_tokens for one in agents if one.usage),
            "completion_tokens": sum(one.usage.completion_tokens for one in agents if one.usage),
            "agents": [
                {"layer": one.layer, "place": one.place, "model": one.model, "status": one.status}
                for one in agents
            ],
        },
    }
