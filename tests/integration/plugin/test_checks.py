"""Requests that would end SGLang (no or unknown tokens) or pin KV (forged marks) are refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from flashmoa.engine.local import LocalEngine

pytestmark = pytest.mark.anyio
Body = dict[str, Any]


def text_body(**params: Any) -> Body:
    return {"text": "x y", "sampling_params": {"max_new_tokens": 2, **params}}


def ids_body(ids: Any) -> Body:
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}


REFUSED = [
    ids_body([-1]), ids_body([10**6]), ids_body([[1], [-1]]),
    ids_body([]), ids_body([[1], []]),
    {**text_body(), "text": ""}, {**text_body(), "text": ["a", ""]},
    {**text_body(), "return_logprob": True, "token_ids_logprob": [10**6]},
    {**text_body(), "return_logprob": True, "token_ids_logprob": [-1]},
    text_body(custom_params={"flashmoa": {"stream": "a"}}), text_body(custom_params=7),
    {**text_body(), "expected_output_tokens": 10**400},
]  # fmt: skip


@pytest.mark.parametrize("body", REFUSED, ids=str)
async def test_it_is_refused_and_the_engine_still_works(engine: LocalEngine, body: Body) -> None:
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as http:
        answer = await http.post("/generate", json=body)
        assert answer.status_code == 400, answer.text
        answer = await http.post("/generate", json=text_body(custom_params={"mine": 1}))
        assert answer.status_code == 200
    assert engine.is_running()


async def test_numbers_too_large_for_a_scheduler_open_no_stream(engine: LocalEngine) -> None:
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as http:
        for name in ("expected_output_tokens", "priority"):
            answer = await http.post("/prompt_streams", json={"text": "x y", name: 10**400})
            assert answer.status_code == 400 and name in answer.text
        assert (await http.get("/prompt_streams")).json()["open"] == 0


async def test_requests_that_keep_no_kv_share_none_in_their_batch(engine: LocalEngine) -> None:
    """A client may mark requests as SGLang's warm-ups of PD pairs, on any engine."""
    beginning = " ".join(f"word{number}" for number in range(60))
    texts = [f"{beginning} {number}" for number in range(8)]
    body = {**text_body(temperature=0), "text": texts}
    warm_up = {"bootstrap_host": ["2.2.2.2"] * 8, "bootstrap_room": [*range(8)]}
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as http:
        marked = await http.post("/generate", json={**body, **warm_up})
        plain = await http.post("/generate", json=body)
    answers = [[one["text"] for one in answer.json()] for answer in (marked, plain)]
    assert answers[0] == answers[1] and engine.is_running()
