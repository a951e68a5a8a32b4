"""Serve a Mixture-of-Agents as one model of an OpenAI-compatible server (``application``)."""

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

    Sampling parameters come from the configuration. Only ``messages``, ``model`` and ``stream`` of
    a request's body are read. Usage has the last aggregator's tokens, and under ``flashmoa`` those
    of all agents.
    """
    mixtures: dict[str, MixtureOfAgents] = {}

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            mixtures[config.name] = await config.build(stack)
            yield

    async def complete(request: Request) -> Response:
        try:
            body = await request.json()
            question = conversation(body["messages"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = (
                f"the body is not a chat completion request ({type(error).__name__}: {error}); "
                "send an object with messages"
            )
            return _make_error(400, problem)
        if body.get("model", config.name) != config.name:
            problem = f"there is no model {body['model']!r}; ask for {config.name!r}"
            return _make_error(404, problem)
        mixture = mixtures[config.name]
        if body.get("stream"):
            events = _answer_in_events(mixture, config.name, question)
            return StreamingResponse(events, media_type="text/event-stream")
        try:
            async with while_connected(request):
                result = await mixture.answer(question)
                return JSONResponse(_make_completion(config.name, result))
        except MixtureFailed as error:
            return _make_error(502, str(error))
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


def _make_error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)


def _make_head(kind: str, model: str) -> dict[str, Any]:
    name = f"chatcmpl-{secrets.token_hex(12)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def _make_completion(model: str, result: MixtureResult) -> dict[str, Any]:
    message = {"role": "assistant", "content": result.text}
    choice = {"index": 0, "message": message, "finish_reason": result.finish_reason or "stop"}
    head = _make_head("chat.completion", model)
    return {**head, "choices": [choice], "usage": _count_usage(result)}


async def _answer_in_events(
    mixture: MixtureOfAgents, model: str, question: Messages
) -> AsyncGenerator[str]:
    """Answer a question and yield server-sent events."""
    head = _make_head("chat.completion.chunk", model)

    def make_event(delta: dict[str, Any], reason: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return f"data: {json.dumps({**head, 'choices': [choice], **more})}\n\n"

    try:
        async with mixture.answering(question) as run:
            yield make_event({"role": "assistant", "content": ""})
            async for piece in run:
                yield make_event({"content": piece})
            result = await run.result()
        yield make_event({}, result.finish_reason or "stop", usage=_count_usage(result))
    except MixtureFailed as error:
        yield f"data: {json.dumps({'error': {'message': str(error), 'code': 502}})}\n\n"
    yield "data: [DONE]\n\n"


def _count_usage(result: MixtureResult) -> dict[str, Any]:
    last = result.final.usage
    agents = [agent for layer in result.layers for agent in layer]
    usages = [agent.usage for agent in agents if agent.usage is not None]
    prompt, completion = (last.prompt_tokens, last.completion_tokens) if last else (0, 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "flashmoa": {
            "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
            "completion_tokens": sum(usage.completion_tokens for usage in usages),
            "agents": [
                {name: getattr(agent, name) for name in ("layer", "place", "model", "status")}
                for agent in agents
            ],
        },
    }
