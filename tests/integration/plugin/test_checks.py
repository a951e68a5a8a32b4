"""Test that the plugin refuses unknown tokens, which would end SGLang, and forged marks."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from flashmoa.engine.local import LocalEngine

pytestmark = pytest.mark.anyio
Body = dict[str, Any]


def sampled(**params: Any) -> Body:
    return {"text": "x y", "sampling_params": {"max_new_tokens": 2, **params}}


def of_ids(ids: Any) -> Body:
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}


REFUSED = [
    of_ids([-1]), of_ids([10**6]), of_ids([[1], [-1]]),
    {**sampled(), "return_logprob": True, "token_ids_logprob": [10**6]},
    {**sampled(), "return_logprob": True, "token_ids_logprob": [-1]},
    sampled(custom_params={"flashmoa": {"stream": "a"}}), sampled(custom_params=7),
]  # fmt: skip


@pytest.mark.parametrize("body", REFUSED, ids=str)
async def test_an_invalid_request_is_refused_and_the_engine_keeps_running(
    engine: LocalEngine, body: Body
) -> None:
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as http:
        answer = await http.post("/generate", json=body)
        assert answer.status_code == 400, answer.text
        alive = await http.post("/generate", json=sampled(custom_params={"mine": 1}))
        assert alive.status_code == 200
    assert engine.is_running()
