"""What the plugin's scoring routes refuse."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyio

LONG = "word " * 13_000
SCORE, RERANK, CLASSIFY = "/v1/score", "/v1/rerank", "/v1/classify"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (SCORE, {"query": "a", "items": ["b"]}, "exactly one of label_token_ids, candidates"),
    (SCORE, {"items": ["b"], "candidates": [" a"]}, "exactly one of query, messages"),
    (SCORE, {"query": "a", "items": [[1]], "candidates": [" a"]}, "both be text, or both be token"),
    (SCORE, {"query": "a", "label_token_ids": [9_999_999]}, "label_token_ids must be in"),
    (SCORE, {"query": "a", "candidates": [[9_999_999]]}, "items[0]: candidates must be in"),
    (SCORE, {"query": [9_999_999], "items": [[1]], "label_token_ids": [1]}, "items[0]: input_ids"),
    (SCORE, {"query": "a", "candidates": []}, "at least one candidate"),
    (
        SCORE,
        {"query": "a", "items": [], "candidates": [" a"], "prompt_stream_id": "s"},
        "goes with one prompt, not with 0",
    ),
    (RERANK, {"query": " ", "documents": ["a"]}, "query that is not empty"),
    (RERANK, {"query": "q", "documents": []}, "at least one document"),
    (RERANK, {"query": "q", "documents": ["a"], "top_n": -1}, "top_n: "),
    (RERANK, {"query": "q", "documents": ["a", {"x": 1}]}, "documents[1] has no text"),
    (RERANK, {"query": "q", "documents": ["a"] * 10_001}, "documents has 10,001 entries"),
    (RERANK, {"query": {"title": "q"}, "documents": ["a"]}, "query has no text"),
    (CLASSIFY, {"input": ["a"] * 10_001, "labels": ["x", "y"]}, "input has 10,001 entries"),
    (SCORE, {"query": "a", "items": ["b"] * 101, "candidates": [" a"] * 9_999}, "1,009,899 scores"),
    (
        RERANK,
        {"query": "q", "documents": ["a"] * 9_999, "instruct": "b" * 30_000},
        "characters in their prompts together",
    ),
    (
        CLASSIFY,
        {"input": ["a"] * 9_999, "labels": ["x", "y"], "instruct": "b" * 30_000},
        "characters in their prompts together",
    ),
    (RERANK, {"query": "q", "documents": [[{"type": "text"}]]}, "documents.0."),
    (
        SCORE,
        {"query": "a", "label_token_ids": [1], "return_pooled_hidden_states": True},
        "--flashmoa-scoring off",
    ),
    (SCORE, {"query": "a", "items": ["b"], "label_token_ids": [[1]]}, "label_token_ids.0: "),
    (CLASSIFY, {"input": "a"}, "labels: Field required"),
    (CLASSIFY, {"input": "a", "labels": ["x"]}, "2 to 26"),
    (CLASSIFY, {"input": "a", "labels": ["x", "x"]}, "not 2 with 1 different"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "problem"), REFUSED)
async def test_malformed_requests_are_refused_with_the_reason(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], problem: str, stream: bool
) -> None:
    answer = await http.post(path, json={**body, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "malformed")
    assert problem in error["message"]


async def test_refused_item_is_named(http: httpx.AsyncClient) -> None:
    answer = await http.post(RERANK, json={"query": "q", "documents": ["a", LONG], "stream": True})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["item"]) == (413, "too_large", 1)
    assert error["message"].startswith("documents[1]: The prompt has ")
    body = {"query": "To", "items": [" One", " Nep"], "candidates": ["al"]}
    answer = await http.post(SCORE, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["item"]) == (400, "candidate_refused", 1)
    assert error["message"].startswith("items[1]: The candidate 'al' is tokenised together")
