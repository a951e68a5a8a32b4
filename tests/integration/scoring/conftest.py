"""An engine's clients, and the reference for scores: the same model in transformers, in float32."""

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.scoring import Scorer
from tests.event_loop import own_task
from tests.integration.router.serving import serve

Logprobs = Callable[[Sequence[int], Sequence[Sequence[int]]], list[float]]
# The largest difference of two log-probabilities that counts as none.
EXACT = 1e-4
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You judge trips."},
    {"role": "user", "content": "Is Pokhara worth a visit?"},
]


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Any:
    from flashmoa_sglang.sglang import torchvision_ops

    torchvision_ops.allow_mismatched_build()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="session")
def reference(model: Path, tokenizer: Any) -> Logprobs:
    """Return a function of a context and candidates that computes their log-probabilities."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def logprobs(context: Sequence[int], candidates: Sequence[Sequence[int]]) -> list[float]:
        if all(len(candidate) == 1 for candidate in candidates):
            with torch.no_grad():
                last = loaded(torch.tensor([list(context)])).logits[0, -1].double()
            return [float(torch.log_softmax(last, -1)[token]) for (token,) in candidates]
        return [logprob(context, candidate) for candidate in candidates]

    def logprob(context: Sequence[int], candidate: Sequence[int]) -> float:
        with torch.no_grad():
            logits = loaded(torch.tensor([[*context, *candidate]])).logits[0].double()
        rows = torch.log_softmax(logits[len(context) - 1 : -1], -1)
        return math.fsum(float(row[token]) for row, token in zip(rows, candidate, strict=True))

    return logprobs


@pytest.fixture
async def http(engine: LocalEngine) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as connected:
        yield connected


@pytest.fixture
async def scorer(client: EngineClient) -> Scorer:
    return Scorer(client)


@pytest.fixture
async def plain_client(plain_engine: LocalEngine) -> AsyncGenerator[EngineClient]:
    async with EngineClient(plain_engine.url, timeout=60) as connected:
        yield connected


@asynccontextmanager
async def start_as_vllm(plain_engine: LocalEngine) -> AsyncGenerator[str]:
    """Serve vLLM's routes in front of an SGLang engine. tests/vllm asks a real vLLM server."""
    async with httpx.AsyncClient(base_url=plain_engine.url, timeout=60) as sglang:

        async def score(request: Request) -> Response:
            body = await request.json()
            assert body.pop("model")
            answer = await sglang.post("/v1/score", json=body)
            rows = answer.raise_for_status().json()["scores"]
            data = [
                {"index": at, "object": "score", "score": row[0]} for at, row in enumerate(rows)
            ]
            return JSONResponse({"object": "list", "data": data[::-1], "usage": {}})

        async def tokenize(request: Request) -> Response:
            body = await request.json()
            assert "messages" in body or "tokens" in body or isinstance(body["prompt"], str)
            answer = await sglang.post(request.url.path, json=body)
            return Response(answer.content, answer.status_code, media_type="application/json")

        async def models(request: Request) -> Response:
            return JSONResponse(
                {"data": [{"id": "tiny", "owned_by": "vllm", "max_model_len": 8192}]}
            )

        routes = [
            Route("/v1/models", models),
            Route("/generative_scoring", score, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", tokenize, methods=["POST"]),
        ]
        async with serve(Starlette(routes=routes)) as url:
            yield url


@pytest.fixture
async def as_vllm(plain_engine: LocalEngine) -> AsyncGenerator[EngineClient]:
    """Return a client of a server with vLLM's routes."""
    async with own_task(start_as_vllm(plain_engine)) as url, EngineClient(url) as client:
        yield client
