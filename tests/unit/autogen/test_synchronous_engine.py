"""What AutoGen's synchronous methods ask an engine, and what they make of odd answers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from flashmoa.autogen._client import SynchronousEngine
from flashmoa.errors import BadAnswer

MODELS = {"data": [{"id": "other", "max_model_len": 111}, {"id": "m", "max_model_len": 9999}]}


def engine_that_answers(
    monkeypatch: pytest.MonkeyPatch, answer: object
) -> tuple[SynchronousEngine, list[dict[str, str]]]:
    """Return an engine, and the headers of its requests so far."""
    headers: list[dict[str, str]] = []

    def request(method: str, url: str, **more: Any) -> httpx.Response:
        headers.append(more["headers"])
        return httpx.Response(200, json=answer, request=httpx.Request(method, url))

    monkeypatch.setattr(httpx, "request", request)
    return SynchronousEngine("http://engine", {"x-tenant": "a"}), headers


@pytest.mark.parametrize(("model", "expected"), [("m", 9999), ("other", 111), ("unlisted", 111)])
def test_context_is_that_of_the_clients_model_and_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, model: str, expected: int
) -> None:
    engine, headers = engine_that_answers(monkeypatch, MODELS)
    assert [engine.context_length(model) for _ in range(2)] == [expected] * 2
    assert headers == [{"x-tenant": "a"}]


@pytest.mark.parametrize(
    "answer", [{}, {"data": []}, {"data": None}, {"data": [{"id": "m", "max_model_len": None}]}]
)
def test_engine_that_tells_no_context_is_named(
    monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    engine, _ = engine_that_answers(monkeypatch, answer)
    with pytest.raises(BadAnswer, match="http://engine/v1/models gives no such number"):
        engine.context_length("m")
