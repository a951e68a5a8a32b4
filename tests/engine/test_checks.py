"""Bodies that end a stock SGLang server are refused, and the engine goes on."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from flashmoa.engine.local import LocalEngine

pytestmark = pytest.mark.anyio
Body = dict[str, Any]


def sampled(**params: Any) -> Body:
    return {"text": "x y", "sampling_params": {"max_new_tokens": 2, **params}}


def generated(**fields: Any) -> Body:
    return {**sampled(), **fields}


def of_ids(ids: Any) -> Body:
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}


DEADLY = [
    sampled(max_new_tokens=1.5), sampled(max_new_tokens="x"), sampled(temperature="x"),
    sampled(stop=7), sampled(n="x"), sampled(n=0), sampled(n=1.5), sampled(surprise=1),
    sampled(logit_bias=7), sampled(logit_bias={"5": "x"}), sampled(logit_bias={"5": 1e308}),
    sampled(top_k=10**12), sampled(top_k="x"), sampled(skip_special_tokens=7),
    sampled(repetition_penalty=1e-9), sampled(frequency_penalty="x"), sampled(stop_regex="("),
    sampled(stream_interval=0),
    of_ids([-1]), of_ids([10**6]), of_ids([[1], [-1]]), of_ids([[]]), of_ids([]),
    generated(return_logprob=True, logprob_start_len=-5),
    generated(return_logprob=True, top_logprobs_num=10**6),
    generated(return_logprob=True, top_logprobs_num=-1),
    generated(return_logprob=True, token_ids_logprob=[10**6]),
    generated(return_logprob=True, token_ids_logprob=[-1]),
    generated(positional_embed_overrides={"a": 1}),
    generated(rid=["a"]), generated(rid=[]),
    generated(sampling_params=[]), generated(sampling_params=[{}]),
    generated(text=""), generated(text=["x", ""]),
]  # fmt: skip


@pytest.mark.parametrize("body", DEADLY, ids=str)
async def test_what_would_end_sglang_is_refused(engine: LocalEngine, body: Body) -> None:
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as http:
        answer = await http.post("/generate", json=body)
        assert answer.status_code == 400, answer.text
        alive = await http.post("/generate", json=sampled())
        assert alive.status_code == 200
    assert engine.is_running()


async def test_chat_is_checked_as_well(engine: LocalEngine) -> None:
    body = {
        "model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1,
        "logprobs": True, "top_logprobs": 10**6,
    }  # fmt: skip
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as http:
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 400


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        {"stop": ["x", "y"], "stop_token_ids": [1, 2], "no_stop_trim": True},
        {"logit_bias": {"5": 1, "6": -100.0}, "frequency_penalty": 1},
        {"temperature": None, "top_k": -1, "stop": None, "custom_params": None},
        {"regex": "[a-z]+", "min_new_tokens": 1},
    ],
)
async def test_what_sglang_takes_is_taken(engine: LocalEngine, params: Body) -> None:
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as http:
        answer = await http.post("/generate", json=sampled(**params))
    assert answer.status_code == 200, answer.text
